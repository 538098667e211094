//! Who is at the other end of a Unix socket.

use std::io;
use std::os::fd::AsFd;

use nix::sys::socket::{getsockopt, sockopt};

/// User id of the process that connected, or that listens.
///
/// Through nix and not rustix, whose form of the answer cannot hold a peer of another pid namespace: its pid is 0.
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
