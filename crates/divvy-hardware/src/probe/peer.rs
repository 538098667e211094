//! Identifies the process at the other end of a Unix socket.

use std::io;
use std::os::fd::AsFd;

use nix::sys::socket::{getsockopt, sockopt};

/// Return the user id of the process at the other end of the socket.
///
/// This uses nix and not rustix, whose result type cannot represent a peer in another PID namespace: such a peer has PID 0.
pub fn peer_uid(socket: impl AsFd) -> io::Result<u32> {
    Ok(getsockopt(&socket, sockopt::PeerCredentials)?.uid())
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
