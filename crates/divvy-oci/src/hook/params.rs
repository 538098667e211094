//! Changes the text of `/proc/driver/nvidia/params`. Its line `ModifyDeviceFiles` tells the driver's libraries whether to create
//! and change device nodes. In a container they must not, because the container may have only the nodes that it was given.

const NAME: &str = "ModifyDeviceFiles";

/// Return the text with `ModifyDeviceFiles: 0`. The result is `None` if the text does not allow modification anyway.
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
