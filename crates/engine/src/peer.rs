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

    /// Whether this process' namespace of users has a number for the user. The kernel shows every
    /// user without one as the overflow user. Where each user has a number, the overflow user is a
    /// user like others.
    pub(crate) fn is_known(self) -> bool {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let overflow_user = read("/proc/sys/kernel/overflowuid").trim().parse();
        // Lines of three numbers: the first user here, the first one outside, and how many.
        let users = read("/proc/self/uid_map");
        let all_users = ["0", "0", "4294967295"];
        self.user != overflow_user.unwrap_or(OVERFLOW_USER)
            || users.split_whitespace().eq(all_users)
    }
}

/// The overflow user, unless the administrator has chosen another one.
const OVERFLOW_USER: u32 = 65534;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_overflow_user_is_known_where_each_user_has_a_number() {
        let is_known = |user| Peer { process: 1, user }.is_known();
        assert!(is_known(0) && is_known(1000));
        let users = std::fs::read_to_string("/proc/self/uid_map").unwrap();
        assert_eq!(is_known(OVERFLOW_USER), users.trim().ends_with(" 4294967295"));
    }

    #[test]
    fn the_peer_of_a_pair_is_this_process() {
        let (one, _other) = UnixStream::pair().unwrap();
        let user = rustix::process::geteuid().as_raw();
        assert_eq!(Peer::of(&one).unwrap(), Peer { process: std::process::id(), user });
    }
}
