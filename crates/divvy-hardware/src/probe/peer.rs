//! Who is at the other end of a Unix socket.

#![allow(
    unsafe_code,
    reason = "getsockopt(SO_PEERCRED): rustix's form cannot hold a peer of another pid namespace, whose pid is 0"
)]

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd};

/// User id of the process that connected, or that listens.
pub fn peer_uid(socket: impl AsFd) -> io::Result<u32> {
    let mut credentials = MaybeUninit::<libc::ucred>::zeroed();
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is open while `socket` is borrowed; the kernel writes at most `length` bytes, the size of
    // what the pointer points to. All zeros are a valid ucred.
    let (result, credentials) = unsafe {
        let result = libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            credentials.as_mut_ptr().cast(),
            &raw mut length,
        );
        (result, credentials.assume_init())
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if length as usize != size_of::<libc::ucred>() {
        return Err(io::Error::other("the kernel's answer about the peer is too short"));
    }
    Ok(credentials.uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peer_of_a_pair_is_this_user() {
        let (a, _b) = std::os::unix::net::UnixStream::pair().expect("pair");
        assert_eq!(peer_uid(&a).expect("uid"), rustix::process::geteuid().as_raw());
    }
}
