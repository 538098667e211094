//! `/proc/driver/nvidia/params`, by which the driver's libraries decide whether they make and change device nodes: in a container they are not to, since
//! the nodes that it has are those that it was given.

const NAME: &str = "ModifyDeviceFiles";

/// The same lines but for one, which says no; none if that one is there already, or not at all.
pub fn forbidding(text: &str) -> Option<String> {
    let allows = |line: &str| {
        line.split_once(':')
            .is_some_and(|(name, value)| name == NAME && value.trim() == "1")
    };
    text.lines().any(allows).then(|| {
        let lines = text.lines().map(|line| match allows(line) {
            true => format!("{NAME}: 0\n"),
            false => format!("{line}\n"),
        });
        lines.collect()
    })
}
