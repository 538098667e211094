//! Which CUDA a driver has.

/// The first driver branch of each CUDA version (tables 2 and 3 of the CUDA Toolkit Release Notes, and what the libraries of 340, 390, and 418 say).
const TABLE: [(u32, i32); 32] = [
    (615, 13040),
    (610, 13030),
    (595, 13020),
    (590, 13010),
    (580, 13000),
    (575, 12090),
    (570, 12080),
    (565, 12070),
    (560, 12060),
    (555, 12050),
    (550, 12040),
    (545, 12030),
    (535, 12020),
    (530, 12010),
    (525, 12000),
    (520, 11080),
    (515, 11070),
    (510, 11060),
    (495, 11050),
    (470, 11040),
    (465, 11030),
    (460, 11020),
    (455, 11010),
    (450, 11000),
    (440, 10020),
    (418, 10010),
    (410, 10000),
    (396, 9020),
    (390, 9010),
    (384, 9000),
    (375, 8000),
    (352, 7050),
];

/// Return the branch of a driver: 550 for `550.54.15`. `None` for the driver of a Tegra, whose version is empty.
pub fn branch(driver: &str) -> Option<u32> {
    driver.split('.').next()?.parse().ok()
}

/// Return the CUDA version of a driver such as `550.54.15` as NVML and CUDA encode it: 12040 for 12.4. A Tegra's driver has 10.0.
pub fn cuda_version(driver: &str) -> i32 {
    let branch = branch(driver).unwrap_or(410);
    let found = TABLE.iter().find(|(first, _)| branch >= *first);
    found.map_or(6050, |(_, cuda)| *cuda)
}

/// Read a version such as `12.4` as CUDA encodes it.
pub fn parse_version(text: &str) -> Option<i32> {
    let (major, minor) = text.split_once('.')?;
    let (major, minor): (i32, i32) = (major.parse().ok()?, minor.parse().ok()?);
    ((1..100).contains(&major) && (0..100).contains(&minor)).then(|| major * 1000 + minor * 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_has_the_cuda_of_its_branch() {
        let cases = [
            ("615.71.09", 13040),
            ("580.159.03", 13000),
            ("550.54.15", 12040),
            ("470.82.01", 11040),
            ("450.36.06", 11000),
            ("390.46", 9010),
            ("340.108", 6050),
            ("", 10000),
        ];
        for (driver, cuda) in cases {
            assert_eq!(cuda_version(driver), cuda, "{driver}");
        }
    }

    #[test]
    fn versions_are_read_as_cuda_writes_them() {
        for (text, version) in [
            ("11.0", Some(11000)),
            ("12.4", Some(12040)),
            ("13.4", Some(13040)),
            ("12", None),
            ("a.b", None),
            ("-1.0", None),
            ("1000000000.0", None),
        ] {
            assert_eq!(parse_version(text), version, "{text}");
        }
    }
}
