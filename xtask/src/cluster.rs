//! `cargo xtask cluster`: a real Kubernetes with Divvy on this machine. It is a front end for the scripts in `e2e/`, which also work on their own.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail, ensure};

use crate::cargo::build_workspace;
use crate::target_directory::debug_directory;

const HELP: &str = "\
Run a real Kubernetes with Divvy on this machine

usage: cargo xtask cluster COMMAND

  up [--nodes N] [--rbac] [--service-accounts]
                            start etcd, kube-apiserver, kube-scheduler, kube-controller-manager, and for each node containerd, runc,
                            and a kubelet; missing programs are first built from Go modules (6 minutes, once)
  divvy [--machines FILE]   build Divvy and start it on the running cluster: extender, agents, simulated GPUs
  divvy --down              stop Divvy
  install [--image FILE] [--no-check]
                            install Divvy as a user does, instead of `divvy`: the image (built if none is named) and the objects of
                            the Helm chart; check what only an installation has. Needs `up --rbac --service-accounts`
  install --down            remove the installation
  install --uninstall       remove it as a user does, with `divvy uninstall`, and check that nothing is left (six minutes)
  nvidia [SHAPE...]         check NVIDIA's Helm chart and static manifests with Divvy's image on the installed cluster, in all shapes or in
                            those named: mps, mig-single, volume-mounts, ... (docs/nvidia.md lists them)
  kubectl ARGS...           run the cluster's kubectl, with Divvy's plugins: kubectl inspect gpushare
  status                    show the running processes, versions, nodes, and KUBECONFIG
  restart [-9] NAME...      restart (with -9: kill first) kube-scheduler, n1.kubelet, n1.containerd, n1.agent, divvy-extender, ...
  enter NODE COMMAND...     run a command with that node's /var/lib/kubelet, /run/containerd, /run/cdi, and /dev
  down [--keep-logs]        stop the cluster and check that nothing is left on the machine
  build [PROGRAM...]        only build the programs; nvidia-device-plugin and nvidia-cdi-hook, which are NVIDIA's own, only if they are named

Examples:
  cargo xtask cluster up && cargo xtask cluster divvy
  export KUBECONFIG=/tmp/divvy-cluster/admin.kubeconfig       (`status` prints the line, with kubectl's directory)
  kubectl get nodes
  cargo xtask cluster up --nodes 2                            a second node, now or later; running processes stay as they are
  cargo xtask cluster down && cargo xtask cluster up --rbac   with Node and RBAC authorization
  cargo xtask cluster restart -9 n1.kubelet
  cargo xtask cluster enter n1 ls -l /dev/nvidia0

Needs root, Go, gcc, pkg-config, openssl, and a Go module proxy, but no container engine, registry, or GPU. If a requirement is missing,
the command prints which one and what therefore cannot be tested, and ends with status 77: skipped, not passed. Programs are built into
~/.cache/divvy-cluster/ (0.5 GB); state and logs are in CLUSTER_DIR (/tmp/divvy-cluster). For more settings see e2e/README.md.";

/// A call of a script in `e2e/`, with its arguments and environment variables.
#[derive(Debug, Default, PartialEq, Eq)]
struct ScriptCall {
    script: &'static str,
    args: Vec<String>,
    env: Vec<(&'static str, String)>,
    needs_divvy: bool,
    /// Whether an image must be built, because none is named.
    needs_image: bool,
}

pub(crate) fn run(args: &[&str]) -> Result<ExitCode> {
    if matches!(args, [] | ["--help" | "-h" | "help"] | [_, "--help" | "-h"]) {
        #[expect(clippy::print_stdout, reason = "requested help is output")]
        {
            println!("{HELP}");
        }
        return Ok(if args.is_empty() {
            ExitCode::from(2)
        } else {
            ExitCode::SUCCESS
        });
    }
    if let ["kubectl", rest @ ..] = args {
        return kubectl(rest);
    }
    Ok(ExitCode::from(script(args)?))
}

/// Report whether the cluster runs.
pub(crate) fn is_up() -> bool {
    directory().join("pids/kube-apiserver").exists()
}

/// Report whether Divvy runs on the cluster, either as processes or installed.
pub(crate) fn has_divvy() -> bool {
    is_up() && directory().join("divvy.settings").exists()
}

fn directory() -> PathBuf {
    std::env::var_os("CLUSTER_DIR").map_or_else(|| std::env::temp_dir().join("divvy-cluster"), PathBuf::from)
}

/// Run the cluster's kubectl. kubectl finds Divvy's plugins like all plugins, by their names in the PATH.
fn kubectl(args: &[&str]) -> Result<ExitCode> {
    ensure!(
        is_up(),
        "no cluster runs in {}; run cargo xtask cluster up",
        directory().display()
    );
    let status = Command::new("bash")
        .arg(e2e().join("kubectl.sh"))
        .args(args)
        .env("DIVVY_BIN", std::path::absolute(debug_directory())?)
        .status()
        .context("bash could not be run")?;
    Ok(ExitCode::from(
        status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1),
    ))
}

/// Run a subcommand. Return the script's exit status; 77 means that this machine lacks something.
pub(crate) fn script(args: &[&str]) -> Result<u8> {
    let mut plan = plan(args)?;
    if plan.needs_divvy {
        build_workspace()?;
        let directory = std::path::absolute(debug_directory()).context("the directory of cargo's builds is unknown")?;
        plan.env.push(("DIVVY_BIN", directory.display().to_string()));
    }
    if plan.needs_image {
        // A cluster for tests: half the build time matters more than the size.
        crate::image::run(&["--fast"])?;
        plan.env.push(("IMAGE", crate::image::default_file()?));
    }
    let script = e2e().join(plan.script);
    let status = Command::new("bash")
        .arg(&script)
        .args(&plan.args)
        .envs(plan.env)
        .status()
        .with_context(|| format!("bash {} could not be run", script.display()))?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

fn e2e() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e")
}

fn plan(args: &[&str]) -> Result<ScriptCall> {
    let (command, rest) = args.split_first().context(HELP)?;
    let owned = |args: &[&str]| args.iter().map(|arg| (*arg).to_owned()).collect();
    match *command {
        "up" => up(rest),
        "divvy" => divvy(rest),
        "install" => install(rest),
        "nvidia" => Ok(ScriptCall {
            script: "install.sh",
            args: owned(args),
            ..ScriptCall::default()
        }),
        "status" if rest.is_empty() => Ok(ScriptCall {
            script: "status.sh",
            ..ScriptCall::default()
        }),
        "build" => Ok(ScriptCall {
            script: "build.sh",
            args: owned(rest),
            ..ScriptCall::default()
        }),
        "down" if matches!(rest, [] | ["--keep-logs"]) => Ok(ScriptCall {
            script: "down.sh",
            args: owned(rest),
            ..ScriptCall::default()
        }),
        "restart" if !rest.is_empty() => Ok(ScriptCall {
            script: "program.sh",
            args: owned(args),
            ..ScriptCall::default()
        }),
        "enter" if rest.len() >= 2 => Ok(ScriptCall {
            script: "enter.sh",
            args: owned(rest),
            ..ScriptCall::default()
        }),
        _ => bail!(
            "unknown command `cargo xtask cluster {}`; see `cargo xtask cluster --help`",
            args.join(" ")
        ),
    }
}

fn up(mut args: &[&str]) -> Result<ScriptCall> {
    let mut env = Vec::new();
    while let [flag, rest @ ..] = args {
        args = rest;
        match (*flag, rest) {
            ("--rbac", _) => env.push(("AUTHORIZATION", "RBAC".to_owned())),
            ("--service-accounts", _) => env.push(("SERVICE_ACCOUNTS", "1".to_owned())),
            ("--nodes", [number, rest @ ..]) => {
                args = rest;
                let valid = number.parse::<u8>().is_ok_and(|number| (1..=9).contains(&number));
                ensure!(
                    valid,
                    "--nodes {number}: use a number from 1 to 9, because all nodes run on this machine"
                );
                env.push(("NODES", (*number).to_owned()));
            }
            _ => bail!("unknown argument `{flag}`; up takes --nodes N, --rbac, and --service-accounts"),
        }
    }
    Ok(ScriptCall {
        script: "up.sh",
        env,
        ..ScriptCall::default()
    })
}

fn divvy(args: &[&str]) -> Result<ScriptCall> {
    let up = |env| ScriptCall {
        script: "divvy.sh",
        args: vec!["up".to_owned()],
        env,
        needs_divvy: true,
        needs_image: false,
    };
    match args {
        [] => Ok(up(Vec::new())),
        ["--machines", file] => Ok(up(vec![("MACHINES", (*file).to_owned())])),
        ["--down"] => Ok(ScriptCall {
            script: "divvy.sh",
            args: vec!["down".to_owned()],
            ..ScriptCall::default()
        }),
        _ => bail!(
            "unknown arguments `{}`; divvy takes --machines FILE or --down",
            args.join(" ")
        ),
    }
}

fn install(mut args: &[&str]) -> Result<ScriptCall> {
    let only = |what: &str| ScriptCall {
        script: "install.sh",
        args: vec![what.to_owned()],
        ..ScriptCall::default()
    };
    match args {
        ["--down"] => return Ok(only("down")),
        ["--uninstall"] => return Ok(only("uninstall")),
        _ => {}
    }
    let (mut image, mut what) = (None, "up-and-check");
    while let [flag, rest @ ..] = args {
        args = rest;
        match (*flag, rest) {
            ("--no-check", _) => what = "up",
            ("--image", [file, rest @ ..]) => {
                args = rest;
                image = Some((*file).to_owned());
            }
            _ => bail!("unknown argument `{flag}`; install takes --image FILE, --no-check, --down, or --uninstall"),
        }
    }
    Ok(ScriptCall {
        script: "install.sh",
        args: vec![what.to_owned()],
        needs_image: image.is_none(),
        env: image.map(|image| ("IMAGE", image)).into_iter().collect(),
        needs_divvy: true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_what_the_scripts_get() {
        let env = |args: &[&str]| plan(args).expect("understood").env;
        assert_eq!(env(&["up"]), []);
        assert_eq!(
            env(&["up", "--rbac", "--nodes", "2"]),
            [("AUTHORIZATION", "RBAC".to_owned()), ("NODES", "2".to_owned())]
        );
        assert_eq!(
            plan(&["restart", "-9", "n1.kubelet"]).expect("understood").args,
            ["restart", "-9", "n1.kubelet"]
        );
        assert_eq!(
            plan(&["enter", "n1", "ls", "-l"]).expect("understood").args,
            ["n1", "ls", "-l"]
        );
        assert!(plan(&["divvy"]).expect("understood").needs_divvy);
        assert_eq!(env(&["up", "--service-accounts"]), [("SERVICE_ACCOUNTS", "1".to_owned())]);
        assert_eq!(env(&["install", "--image", "x.tar"]), [("IMAGE", "x.tar".to_owned())]);
        let built = plan(&["install", "--no-check"]).expect("understood");
        assert_eq!((built.args, built.needs_image), (vec!["up".to_owned()], true));
        assert_eq!(plan(&["nvidia", "mps"]).expect("understood").args, ["nvidia", "mps"]);
        assert_eq!(plan(&["install", "--down"]).expect("understood").args, ["down"]);
        assert_eq!(plan(&["install", "--uninstall"]).expect("understood").args, ["uninstall"]);
        assert!(!plan(&["divvy", "--down"]).expect("understood").needs_divvy);
    }

    #[test]
    fn what_is_not_understood_is_refused_with_what_is() {
        for args in [
            &["up", "--nodes"][..],
            &["up", "--nodes", "0"],
            &["up", "--nodes", "10"],
            &["up", "--node", "1"],
            &["down", "now"],
            &["restart"],
            &["enter", "n1"],
            &["divvy", "--machines"],
            &["install", "--image"],
            &["install", "--down", "--no-check"],
            &["nonsense"],
        ] {
            let text = plan(args).expect_err("not understood").to_string();
            assert!(
                text.contains("takes --") || text.contains("1 to 9") || text.contains("--help"),
                "{text}"
            );
        }
    }

    /// If a version changed only in a go.mod file, the cluster would differ from `e2e/versions.env`.
    #[test]
    fn versions_are_chosen_in_one_place() {
        let output = Command::new("bash")
            .arg(e2e().join("build.sh"))
            .arg("--check")
            .output()
            .expect("bash is there");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    #[test]
    fn every_script_that_the_help_names_is_there_and_is_a_script() {
        for name in [
            "up.sh",
            "down.sh",
            "status.sh",
            "build.sh",
            "program.sh",
            "enter.sh",
            "divvy.sh",
            "install.sh",
            "kubectl.sh",
        ] {
            let path = e2e().join(name);
            let output = Command::new("bash").arg("-n").arg(&path).output().expect("bash is there");
            assert!(path.is_file() && output.status.success(), "{name}: {output:?}");
        }
    }
}
