//! The seeds of the fuzz targets. Fuzzing starts from them, so code that they do not reach is hardly ever reached.

use divvy_fuzz::targets::{documented, targets};

#[test]
fn each_seed_of_each_fuzz_target_ends_as_it_declares() {
    let broken = targets().into_iter().filter_map(|target| target.check_seeds().err());
    let broken: Vec<String> = broken.map(|rule| rule.to_string()).collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn the_documentation_names_the_fuzz_targets_that_there_are() {
    assert_eq!(documented(&targets()), Ok(()));
}
