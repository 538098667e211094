//! The report that a container of the test image printed about itself, read from the files of the kubelet and containerd.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use divvy_testbed::scenario::{is_of_a_gpu, mounts_of_drivers};
use divvy_testbed::simulated_driver;

/// The report of the newest start of a container.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Printed {
    /// The id in containerd.
    pub(super) id: String,
    pub(super) env: BTreeMap<String, String>,
    /// The device nodes of GPUs and the driver.
    pub(super) devices: Vec<String>,
    /// The mount points of a driver's files.
    pub(super) mounts: Vec<String>,
    /// Whether the report's last line is present.
    pub(super) whole: bool,
}

/// Read `/var/log/pods/NAMESPACE_POD_UID/CONTAINER/ATTEMPT.log` below a node's directory. The container's id is part of the name of the
/// link `/var/log/containers/POD_NAMESPACE_CONTAINER-ID.log` to this file.
pub(super) fn newest(node: &Path, pod_uid: &str, container: &str) -> io::Result<Option<Printed>> {
    let Some(pod) = simulated_driver::names(&node.join("var/log/pods"))?
        .into_iter()
        .find(|name| name.ends_with(&format!("_{pod_uid}")))
    else {
        return Ok(None);
    };
    let attempts = simulated_driver::names(&node.join("var/log/pods").join(&pod).join(container))?;
    let attempts = attempts
        .iter()
        .filter_map(|name| name.strip_suffix(".log")?.parse::<u64>().ok());
    let Some(attempt) = attempts.max() else {
        return Ok(None);
    };
    let target = format!("{pod}/{container}/{attempt}.log");
    let links = node.join("var/log/containers");
    let id = simulated_driver::names(&links)?.into_iter().find_map(|link| {
        let to = std::fs::read_link(links.join(&link)).ok()?;
        let id = link.strip_suffix(".log")?.rsplit_once('-')?.1.to_owned();
        to.to_string_lossy().ends_with(&target).then_some(id)
    });
    let Some(id) = id else {
        return Ok(None);
    };
    match std::fs::read_to_string(node.join("var/log/pods").join(&target)) {
        Ok(text) => Ok(Some(parse(id, &text))),
        // The pod has just been removed.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Parse the CRI's lines `TIME stdout F TEXT`. The test image prints its environment, its mount points, then
/// `/dev` and other directories with device numbers.
fn parse(id: String, text: &str) -> Printed {
    let mut printed = Printed {
        id,
        env: BTreeMap::new(),
        devices: Vec::new(),
        mounts: Vec::new(),
        whole: false,
    };
    let mut mount_points = Vec::new();
    let mut directory: Option<&str> = None;
    for line in text.lines().filter_map(|line| line.splitn(4, ' ').nth(3)) {
        if let (Some(entry), Some(directory)) = (line.strip_prefix("  "), directory) {
            let name = entry.split(' ').next().unwrap_or_default();
            let path = format!("{directory}/{name}");
            // A name without numbers is not a device.
            if is_of_a_gpu(&path) && entry.contains(':') {
                printed.devices.push(path);
            }
        } else if let Some((path, _)) = line.split_once(": dir ") {
            directory = Some(path);
        } else if line == "probe: running" {
            printed.whole = true;
        } else if let Some(path) = line.strip_prefix("mount ").filter(|_| directory.is_none()) {
            mount_points.push(path.to_owned());
        } else if let Some((key, value)) = line.split_once('=').filter(|_| directory.is_none()) {
            printed.env.insert(key.to_owned(), value.to_owned());
        }
    }
    printed.devices.sort();
    printed.mounts = mounts_of_drivers(mount_points.into_iter());
    printed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_from_the_lines_that_the_runtime_wrote() {
        let lines = [
            "ALIYUN_COM_GPU_MEM_IDX=0",
            "A=b=c d",
            "mount /dev",
            "mount /usr/lib/libcuda.so.550",
            "/dev: dir mode=755 rdev=0:0 size=380",
            "  null 1:3",
            "  nvidia0 195:0",
            "  nvidia-caps",
            "  nvidiactl 195:255",
            "  kfd 511:0",
            "  dri",
            "/dev/dri: dir mode=755 rdev=0:0 size=80",
            "  card1 226:1",
        ];
        let mut text: String = lines
            .iter()
            .map(|line| format!("2026-11-21T15:00:00.1Z stdout F {line}\n"))
            .collect();
        let env = BTreeMap::from([
            ("ALIYUN_COM_GPU_MEM_IDX".to_owned(), "0".to_owned()),
            ("A".to_owned(), "b=c d".to_owned()),
        ]);
        let devices = ["/dev/dri/card1", "/dev/kfd", "/dev/nvidia0", "/dev/nvidiactl"]
            .map(str::to_owned)
            .to_vec();
        let expected = |whole| Printed {
            id: "x".to_owned(),
            env: env.clone(),
            devices: devices.clone(),
            mounts: vec!["/usr/lib/libcuda.so.550".to_owned()],
            whole,
        };
        assert_eq!(parse("x".to_owned(), &text), expected(false));
        text.push_str("2026-11-21T15:00:00.2Z stdout F probe: running\n");
        assert_eq!(parse("x".to_owned(), &text), expected(true));
    }
}
