/// Return the name of the architecture with this compute capability, or `undefined` if this program does not know it.
pub(crate) fn family((major, minor): (u32, u32)) -> &'static str {
    match (major, minor) {
        (1, _) => "tesla",
        (2, _) => "fermi",
        (3, _) => "kepler",
        (5, _) => "maxwell",
        (6, _) => "pascal",
        (7, 0..5) => "volta",
        (7, _) => "turing",
        (8, 0..9) => "ampere",
        (8, _) => "ada-lovelace",
        (9, _) => "hopper",
        (10 | 12, _) => "blackwell",
        (13, _) => "rubin",
        _ => "undefined",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_compute_capability_belongs_to_a_family() {
        for (cc, name) in [
            ((1, 3), "tesla"),
            ((2, 1), "fermi"),
            ((3, 7), "kepler"),
            ((4, 0), "undefined"),
            ((5, 2), "maxwell"),
            ((6, 1), "pascal"),
            ((7, 0), "volta"),
            ((7, 2), "volta"),
            ((7, 5), "turing"),
            ((8, 0), "ampere"),
            ((8, 6), "ampere"),
            ((8, 9), "ada-lovelace"),
            ((9, 0), "hopper"),
            ((10, 3), "blackwell"),
            ((11, 0), "undefined"),
            ((12, 1), "blackwell"),
            ((13, 0), "rubin"),
        ] {
            assert_eq!(family(cc), name, "{cc:?}");
        }
    }
}
