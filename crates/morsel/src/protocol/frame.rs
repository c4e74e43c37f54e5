//! Messages on a stream: the length of the body and the version of the protocol, 4 bytes each, the
//! least significant first; then the body, in JSON. A descriptor comes with the first byte.
//!
//! The other end may send anything, at any speed, or nothing. So a message has a maximum length,
//! and all of it must arrive by a deadline.

use std::io::{self, ErrorKind};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::scm_rights;

/// The version of the messages. A change of the meaning of any message needs another version.
pub(crate) const VERSION: u32 = 1;

/// Bytes of a body: more than a path can have, escaped.
const MOST: usize = 64 << 10;

const HEADER: usize = 8;

/// Why there is no message.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FrameError {
    /// The other end closed the stream, and sent nothing.
    #[error("the other end has hung up")]
    End,
    #[error("the other end speaks version {0} of the protocol, not {VERSION}")]
    Version(u32),
    #[error("{0}")]
    Malformed(String),
    #[error("the other end is too slow")]
    TooSlow,
    #[error("{0}")]
    System(io::Error),
}

impl From<io::Error> for FrameError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Self::TooSlow,
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Self::End,
            _ => Self::System(error),
        }
    }
}

/// Sends a message, and a descriptor along with it.
pub(crate) fn write<M: Serialize>(
    stream: &UnixStream,
    message: &M,
    descriptor: Option<BorrowedFd<'_>>,
    time: Duration,
) -> Result<(), FrameError> {
    let body = serde_json::to_vec(message).map_err(io::Error::from)?;
    let length = u32::try_from(body.len()).ok().filter(|length| *length as usize <= MOST);
    let length = length.ok_or_else(|| FrameError::Malformed("it is too long".into()))?;
    let mut bytes = Vec::with_capacity(HEADER + body.len());
    bytes.extend(length.to_le_bytes());
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(body);
    let deadline = Instant::now() + time;
    let mut rest = &bytes[..];
    let mut descriptors = descriptor.as_slice();
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?))?;
        let sent = scm_rights::send(stream, rest, descriptors).map_err(io::Error::from)?;
        rest = &rest[sent..];
        descriptors = &[];
    }
    Ok(())
}

/// Receives a message, and the descriptor that came along with it.
pub(crate) fn read<M: DeserializeOwned>(
    stream: &UnixStream,
    time: Duration,
) -> Result<(M, Option<OwnedFd>), FrameError> {
    let deadline = Instant::now() + time;
    let mut header = [0; HEADER];
    let descriptor = fill(stream, &mut header, deadline)?;
    let [a, b, c, d, version @ ..] = header;
    let version = u32::from_le_bytes(version);
    if version != VERSION {
        return Err(FrameError::Version(version));
    }
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    if length > MOST {
        return Err(FrameError::Malformed(format!("{length} bytes are too many; {MOST} at most")));
    }
    let mut body = vec![0; length];
    match fill(stream, &mut body, deadline) {
        Ok(None) => {}
        Ok(Some(_)) => return Err(FrameError::Malformed("a second descriptor".into())),
        Err(FrameError::End) => return Err(FrameError::Malformed("its end is missing".into())),
        Err(error) => return Err(error),
    }
    let message =
        serde_json::from_slice(&body).map_err(|error| FrameError::Malformed(error.to_string()))?;
    Ok((message, descriptor))
}

/// Receives until the bytes are full; at most one descriptor may come with them.
fn fill(
    stream: &UnixStream,
    bytes: &mut [u8],
    deadline: Instant,
) -> Result<Option<OwnedFd>, FrameError> {
    let mut filled = 0;
    let mut descriptor = None;
    while filled < bytes.len() {
        stream.set_read_timeout(Some(left(deadline)?))?;
        let (count, received) =
            scm_rights::receive(stream, &mut bytes[filled..]).map_err(|errno| match errno {
                Errno::MSGSIZE => FrameError::Malformed("more than one descriptor".into()),
                errno => io::Error::from(errno).into(),
            })?;
        match count {
            0 if filled == 0 => return Err(FrameError::End),
            0 => return Err(FrameError::Malformed("its end is missing".into())),
            count => filled += count,
        }
        if received.is_some() && descriptor.is_some() {
            return Err(FrameError::Malformed("a second descriptor".into()));
        }
        descriptor = descriptor.or(received);
    }
    Ok(descriptor)
}

/// Time until the deadline, which has not passed.
fn left(deadline: Instant) -> Result<Duration, FrameError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(FrameError::TooSlow) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use proptest::prelude::*;

    use super::*;
    use crate::protocol::{Reply, Request};

    /// No test waits so long, because all bytes were written before the read.
    const TIME: Duration = vellum_testing::patience::PATIENCE;

    fn read_bytes(bytes: &[u8]) -> Result<(Request, Option<OwnedFd>), FrameError> {
        let (mut here, there) = UnixStream::pair().unwrap();
        here.write_all(bytes).unwrap();
        drop(here);
        read(&there, TIME)
    }

    #[test]
    fn a_message_comes_with_its_descriptor() {
        let (here, there) = UnixStream::pair().unwrap();
        write(&here, &Request::Load, Some(here.as_fd()), TIME).unwrap();
        write(&here, &Request::List, None, TIME).unwrap();
        let (first, descriptor) = read::<Request>(&there, TIME).unwrap();
        assert!(first == Request::Load && descriptor.is_some());
        let (second, descriptor) = read::<Request>(&there, TIME).unwrap();
        assert!(second == Request::List && descriptor.is_none());
    }

    #[test]
    fn another_version_is_named_in_the_error() {
        let found = read_bytes(&[2, 0, 0, 0, 9, 0, 0, 0, b'{', b'}']).unwrap_err();
        assert!(matches!(found, FrameError::Version(9)), "{found:?}");
    }

    #[test]
    fn a_message_that_is_too_long_is_refused_at_once() {
        let found = read_bytes(&[0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0]).unwrap_err();
        assert!(matches!(found, FrameError::Malformed(_)), "{found:?}");
        let (here, _there) = UnixStream::pair().unwrap();
        let reason = "x".repeat(MOST);
        let long = Reply::Refused(crate::protocol::Refusal::Failed { reason });
        assert!(matches!(write(&here, &long, None, TIME), Err(FrameError::Malformed(_))));
    }

    #[test]
    fn a_silent_sender_is_too_slow() {
        let (_here, there) = UnixStream::pair().unwrap();
        let found = read::<Request>(&there, Duration::from_millis(20)).unwrap_err();
        assert!(matches!(found, FrameError::TooSlow), "{found:?}");
    }

    #[test]
    fn two_descriptors_are_refused() {
        let (here, there) = UnixStream::pair().unwrap();
        scm_rights::send(&here, &[6, 0, 0, 0], &[here.as_fd()]).unwrap();
        scm_rights::send(&here, &[1, 0, 0, 0], &[here.as_fd()]).unwrap();
        let found = read::<Request>(&there, TIME).unwrap_err();
        assert!(matches!(found, FrameError::Malformed(_)), "{found:?}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            prop_assert!(read_bytes(&bytes).is_err());
        }

        #[test]
        fn a_message_cut_short_is_an_error(cut in 0..14_usize) {
            let mut whole = vec![6, 0, 0, 0, 1, 0, 0, 0];
            whole.extend(b"\"Load\"");
            prop_assert!(read_bytes(&whole).is_ok());
            let found = read_bytes(&whole[..cut]).unwrap_err();
            let as_expected = match found {
                FrameError::End => cut == 0,
                FrameError::Malformed(_) => cut > 0,
                _ => false,
            };
            prop_assert!(as_expected);
        }
    }
}
