//! Handing descriptors to another process (`SCM_RIGHTS`).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::error::{Error, Result};
use crate::morsel::Morsel;

/// The byte that is sent with a Morsel: a process cannot send a descriptor alone.
const MARK: &[u8] = b"M";

impl Morsel {
    /// Sends its descriptor to the other end of a socket, which gets all rights of the descriptor:
    /// see [`read_only`](Self::read_only).
    ///
    /// # Errors
    /// The error of the system.
    pub fn send(&self, socket: &UnixStream) -> Result<()> {
        let failed = |errno| Error::System { doing: "sending a Morsel", errno };
        let descriptor = [rustix::fd::AsFd::as_fd(self)];
        let sent = send(socket, MARK, &descriptor).map_err(failed)?;
        if sent == MARK.len() { Ok(()) } else { Err(failed(Errno::PIPE)) }
    }

    /// Receives a Morsel from the other end of a socket, which need not be trusted.
    ///
    /// # Errors
    /// As [`from_descriptor`](Self::from_descriptor), and [`Error::NotMorsel`] if the other end
    /// sends anything else than [`send`](Self::send) does; the system's error.
    pub fn receive(socket: &UnixStream) -> Result<Self> {
        let mut mark = [0; MARK.len()];
        let received = receive(socket, &mut mark)
            .map_err(|errno| Error::System { doing: "receiving a Morsel", errno })?;
        match received {
            (1, Some(descriptor)) if mark == MARK => Self::from_descriptor(descriptor),
            (0, _) => Err(Error::NotMorsel { reason: "the other end has hung up".into() }),
            _ => Err(Error::NotMorsel { reason: "something else was sent".into() }),
        }
    }
}

/// Sends bytes, and descriptors with the first of them; returns how many bytes it sent.
pub(crate) fn send(
    socket: &UnixStream,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::INVAL);
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// Receives bytes, and a descriptor if one came with them; returns how many bytes it received.
///
/// More than one descriptor is an error: `EMSGSIZE`, and all of them are closed.
pub(crate) fn receive(
    socket: &UnixStream,
    bytes: &mut [u8],
) -> Result<(usize, Option<OwnedFd>), Errno> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
    loop {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let message = match recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags) {
            Err(Errno::INTR) => continue,
            result => result?,
        };
        let mut descriptors: Vec<OwnedFd> = Vec::new();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = part {
                descriptors.extend(received);
            }
        }
        if descriptors.len() > 1 || message.flags.contains(ReturnFlags::CTRUNC) {
            return Err(Errno::MSGSIZE);
        }
        return Ok((message.bytes, descriptors.pop()));
    }
}
