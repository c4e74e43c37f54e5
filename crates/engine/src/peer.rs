//! Who the other side of a socket is.
#![allow(unsafe_code)]

use std::io;
use std::mem::size_of;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;

/// The process at the other side of a socket, when it connected or listened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    /// Its number; 0 if it is in another namespace of processes, as of another container.
    pub process: u32,
    /// Its effective user.
    pub user: u32,
}

impl Peer {
    /// The peer of this socket, according to the kernel. (`socket_peercred` of rustix 1.1 takes the
    /// process 0 for an error.)
    ///
    /// # Errors
    /// The socket is not connected.
    pub(crate) fn of(socket: &UnixStream) -> io::Result<Peer> {
        let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
        let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
        let place = (&raw mut found).cast();
        // SAFETY: the kernel writes at most `bytes` bytes to `found`, whose fields are integers.
        match unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, place, &raw mut bytes) } {
            0 => Ok(Peer { process: found.pid.cast_unsigned(), user: found.uid }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Peer {
    /// Whether the user has a number in this namespace of users. The kernel shows all users that
    /// have none by one number, which is that of a user as well where all have theirs.
    pub(crate) fn is_known(self) -> bool {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let nobody = read("/proc/sys/kernel/overflowuid").trim().parse().unwrap_or(NOBODY);
        let map = read("/proc/self/uid_map");
        self.user != nobody || map.split_whitespace().eq(["0", "0", "4294967295"])
    }
}

/// The usual number of users that have none.
const NOBODY: u32 = 65534;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_users_are_known_but_nobody_of_a_namespace() {
        let is_known = |user| Peer { process: 1, user }.is_known();
        assert!(is_known(0) && is_known(1000));
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap();
        assert_eq!(is_known(NOBODY), map.trim().ends_with(" 4294967295"));
    }

    #[test]
    fn the_peer_of_a_pair_is_this_process() {
        let (one, _other) = UnixStream::pair().unwrap();
        let user = rustix::process::geteuid().as_raw();
        assert_eq!(Peer::of(&one).unwrap(), Peer { process: std::process::id(), user });
    }
}
