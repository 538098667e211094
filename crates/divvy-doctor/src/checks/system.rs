//! Checks of the operating system, and of the toolkit that makes drivers available in containers.

use crate::check::{CheckVerdict, Severity, milder, problem, skip};
use crate::facts::{Facts, version_at_least};

/// Judge check R01.
pub(super) fn linux(facts: &Facts<'_>) -> CheckVerdict {
    let release = facts.text("/proc/sys/kernel/osrelease").or_else(|| {
        let version = facts.text("/proc/version")?;
        version.split_whitespace().nth(2).map(str::to_owned)
    });
    let Some(release) = release else {
        return skip("the kernel version is unknown: there is no /proc/sys/kernel/osrelease");
    };
    let arch = facts.text("/proc/sys/kernel/arch").or_else(|| facts.arch.clone());
    let found = format!("Linux {release} {}", arch.as_deref().unwrap_or("(unknown processor)"));
    let known = arch.is_none_or(|arch| ["x86_64", "aarch64", "arm64"].contains(&arch.as_str()));
    if known && version_at_least(&release, &[3, 10, 1]) {
        Ok(found)
    } else {
        problem(
            found,
            "GPU drivers and container runtimes for GPUs exist only for Linux later than 3.10, on x86_64 and arm64",
            "upgrade the distribution",
        )
    }
}

/// Judge check R02.
pub(super) fn modules(facts: &Facts<'_>) -> CheckVerdict {
    if facts.kubelet().is_none() {
        return skip("no kubelet here");
    }
    let lists = |path: &str, name: &str| {
        let text = facts.root.text(path).unwrap_or_default();
        text.lines().any(|line| line.split_whitespace().any(|word| word == name))
    };
    let loaded = |name: &str| lists("/proc/modules", name) || facts.exists(&format!("/sys/module/{name}"));
    let mut missing = Vec::new();
    if !loaded("overlay") && !lists("/proc/filesystems", "overlay") {
        missing.push("overlay");
    }
    if !loaded("br_netfilter") && !facts.exists("/proc/sys/net/bridge") {
        missing.push("br_netfilter");
    }
    // The files that list the modules to load at boot.
    let mut written = vec!["/etc/modules".to_owned()];
    for directory in ["/etc/modules-load.d", "/usr/lib/modules-load.d", "/run/modules-load.d"] {
        written.extend(
            facts
                .root
                .names(directory)
                .into_iter()
                .map(|name| format!("{directory}/{name}")),
        );
    }
    let words: Vec<(String, String)> = written
        .iter()
        .filter_map(|file| Some((file, facts.text(file)?)))
        .flat_map(|(file, text)| {
            let lines: Vec<String> = text.lines().map(|line| line.trim().to_owned()).collect();
            lines.into_iter().map(move |line| (file.clone(), line))
        })
        .collect();
    let typo = words
        .iter()
        .find(|(_, word)| word.starts_with("br_netf") && word != "br_netfilter");
    let fix = "modprobe -a overlay br_netfilter; printf 'overlay\\nbr_netfilter\\n' > /etc/modules-load.d/k8s.conf";
    let why = "without them containerd cannot make snapshots and pods have no network: \"bridge-nf-call-iptables: no such file or directory\"";
    if !missing.is_empty() {
        return problem(format!("not loaded: {}", missing.join(", ")), why, fix);
    }
    if let Some((file, word)) = typo {
        return problem(format!("{file} names {word:?}, which is not a kernel module"), why, fix);
    }
    if !words.iter().any(|(_, word)| word == "br_netfilter") && lists("/proc/modules", "br_netfilter") {
        return milder(
            Severity::Info,
            "br_netfilter is loaded, but no file in /etc/modules-load.d names it",
            "unless something else loads the module, it is missing after the next boot",
            fix,
        );
    }
    Ok("both are loaded".to_owned())
}

/// Return the version of NVIDIA's container toolkit from its dpkg package.
fn toolkit(facts: &Facts<'_>) -> Option<String> {
    [
        "nvidia-container-toolkit",
        "nvidia-container-toolkit-base",
        "nvidia-container-runtime",
    ]
    .iter()
    .find_map(|name| facts.package(name))
}

/// Judge check R03.
pub(super) fn installed(facts: &Facts<'_>) -> CheckVerdict {
    facts.nvidia()?;
    let own = facts.program(&["divvy-runtime"]);
    let theirs = facts.program(&["nvidia-container-runtime"]);
    let spec = facts.has_spec("nvidia.com");
    let version = toolkit(facts);
    let old = theirs.is_some() && version.as_ref().is_some_and(|version| !version_at_least(version, &[1, 7]));
    if spec || own.is_some() || (theirs.is_some() && !old) {
        let mut found: Vec<String> = own.into_iter().collect();
        found.extend(theirs.map(|path| match &version {
            Some(version) => format!("{path} {version}"),
            None => format!("{path}, unknown version (not a dpkg package)"),
        }));
        if spec {
            found.push("a CDI spec".to_owned());
        }
        return Ok(found.join(", "));
    }
    let why = "containers get no driver: they fail with \"nvidia-container-runtime: not found\", or see no GPU";
    if let (true, Some(version)) = (old, version) {
        return problem(
            format!("nvidia-container-toolkit {version}"),
            "device plugins need nvidia-container-toolkit 1.7.0 or later",
            format!(
                "upgrade it (apt-get install nvidia-container-toolkit, dnf upgrade nvidia-container-toolkit), or use CDI instead: {}",
                facts.generate("nvidia", "/etc/cdi/nvidia.yaml")
            ),
        );
    }
    problem(
        "there is no CDI spec, no divvy-runtime, and no nvidia-container-runtime",
        why,
        format!(
            "{} if the engine supports CDI (R15); otherwise install divvy-runtime (docs/runtime.md)",
            facts.generate("nvidia", "/var/run/cdi/nvidia.yaml")
        ),
    )
}

/// Judge check R04.
pub(super) fn cgroup_v2(facts: &Facts<'_>) -> CheckVerdict {
    facts.nvidia()?;
    if !facts.exists("/sys/fs/cgroup/cgroup.controllers") {
        return Ok("cgroup v1".to_owned());
    }
    let Some(version) = toolkit(facts) else {
        return skip("nvidia-container-toolkit is not installed, or is not a dpkg package");
    };
    if version_at_least(&version, &[1, 8]) {
        Ok(format!("cgroup v2, toolkit {version}"))
    } else {
        problem(
            format!("cgroup v2 and nvidia-container-toolkit {version}"),
            "the toolkit before 1.8 cannot allow devices in cgroup v2: \"bpf_prog_query(BPF_CGROUP_DEVICE) failed: operation not permitted\"",
            "upgrade nvidia-container-toolkit (no-cgroups = true does not help: a container can then open any device or none)",
        )
    }
}
