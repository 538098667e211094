//! Changes the text of `/proc/driver/nvidia/params`. Its line `ModifyDeviceFiles` tells the driver's libraries whether to create
//! and change device nodes. In a container they must not, because the container may have only the nodes that it was given.

const NAME: &str = "ModifyDeviceFiles";

/// Return the text with `ModifyDeviceFiles: 0`. The result is `None` if the text does not allow modification anyway.
pub fn forbidding(text: &str) -> Option<String> {
    let allows = |line: &str| {
        line.split_once(':')
            .is_some_and(|(name, value)| name == NAME && value.trim() == "1")
    };
    // A line is passed on with its own end.
    let lines = text.split_inclusive('\n');
    lines.clone().any(allows).then(|| {
        let lines = lines.map(|line| {
            if allows(line) {
                format!("{NAME}: 0\n")
            } else {
                line.to_owned()
            }
        });
        lines.collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_line_that_allows_changes_is_replaced() {
        let allows = "ModifyDeviceFiles: 1";
        for (text, expected) in [
            (
                "A: 1\nModifyDeviceFiles: 1\nB: 2\n",
                Some("A: 1\nModifyDeviceFiles: 0\nB: 2\n"),
            ),
            (allows, Some("ModifyDeviceFiles: 0\n")),
            (
                "A: 1\r\r\n\nModifyDeviceFiles: 1\r\nB: 2",
                Some("A: 1\r\r\n\nModifyDeviceFiles: 0\nB: 2"),
            ),
            ("ModifyDeviceFiles: 0\n", None),
            ("OtherModifyDeviceFiles: 1\n", None),
            ("", None),
        ] {
            assert_eq!(forbidding(text).as_deref(), expected, "{text:?}");
        }
    }
}
