//! The page through which the parent knows which call of the driver the child is in, also when the child cannot say anything any more.
//!
//! It is a file in memory that both have open: the child as its standard input. So it needs no `/dev/shm`, and no mapped memory.

use std::os::fd::{AsFd, OwnedFd};

use divvy_smoke_report::StepId;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{Errno, pread, pwrite};

/// The size of what is written: the step, the length of the call's name, and the name.
const SIZE: usize = 64;

/// Make a page.
pub(crate) fn make() -> Result<OwnedFd, Errno> {
    memfd_create("divvy-smoke", MemfdFlags::CLOEXEC)
}

/// Say which call begins. A page that cannot be written is none: the parent then knows only the step that it has heard of.
pub(crate) fn write(page: impl AsFd, step: StepId, call: &str) {
    let mut bytes = [0; SIZE];
    let name = &call.as_bytes()[..call.len().min(SIZE - 2)];
    bytes[0] = 1 + step as u8;
    bytes[1] = name.len() as u8;
    bytes[2..2 + name.len()].copy_from_slice(name);
    let _ = pwrite(page, &bytes, 0);
}

/// Return the step and the call that began last.
pub(crate) fn read(page: impl AsFd) -> Option<(StepId, String)> {
    let mut bytes = [0; SIZE];
    pread(page, &mut bytes, 0).ok()?;
    let step = StepId::ALL.get(usize::from(bytes[0]).checked_sub(1)?)?;
    let name = bytes[2..].get(..usize::from(bytes[1]))?;
    Some((*step, String::from_utf8_lossy(name).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_call_is_read_and_an_empty_page_has_none() {
        let page = make().expect("a page");
        assert_eq!(read(&page), None);
        write(&page, StepId::S02, "cuModuleLoadDataEx");
        write(&page, StepId::S09, &"x".repeat(100));
        assert_eq!(read(&page), Some((StepId::S09, "x".repeat(62))));
        write(&page, StepId::S01, "cuInit");
        assert_eq!(read(&page), Some((StepId::S01, "cuInit".to_owned())));
        pwrite(&page, &[77, 255], 0).expect("written");
        assert_eq!(read(&page), None);
    }
}
