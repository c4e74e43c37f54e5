//! One client: its request, and the replies.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use crate::daemon::cache::{Asker, Cache};
use crate::daemon::source::Source;
use crate::protocol::frame::{self, FrameError};
use crate::protocol::{Refusal, Reply, Request};

/// How long a client may take to send its request, and to take a reply.
const PATIENCE: Duration = Duration::from_secs(5);

/// Answers the one request of a connection. Nothing that the client does affects other clients.
pub(super) fn serve(stream: &UnixStream, asker: Asker, cache: &Arc<Cache>) {
    let answered = match frame::read::<Request>(stream, PATIENCE) {
        Ok((request, file)) => answer(stream, request, file, asker, cache),
        Err(FrameError::End) => return,
        Err(error) => Err(Refusal::BadMessage { reason: error.to_string() }),
    };
    if let Err(refusal) = answered {
        refuse(stream, refusal);
    }
}

/// Refuses the connection. A client that does not take the reply has gone.
pub(super) fn refuse(stream: &UnixStream, refusal: Refusal) {
    let _ = frame::write(stream, &Reply::Refused(refusal), None, PATIENCE);
}

fn answer(
    stream: &UnixStream,
    request: Request,
    file: Option<OwnedFd>,
    asker: Asker,
    cache: &Arc<Cache>,
) -> Result<(), Refusal> {
    let source = || file.ok_or(Refusal::NoFile).and_then(Source::new);
    // If a reply cannot be sent, the client has gone.
    let reply = |reply: &Reply| frame::write(stream, reply, None, PATIENCE).is_ok();
    match request {
        Request::Load | Request::LoadAtRest => {
            let source = source()?;
            if request == Request::LoadAtRest {
                source.check_rest()?;
            }
            let total = source.version.length;
            let tell = |done| reply(&Reply::Progress { done, total });
            let (morsel, was_there) = cache.get(source, asker, tell)?;
            let loaded = Reply::Loaded { length: morsel.length(), was_there };
            let _ = frame::write(stream, &loaded, Some(morsel.as_fd()), PATIENCE);
        }
        Request::Remove => {
            reply(&Reply::Removed { objects: cache.remove(&source()?) });
        }
        Request::List => {
            let all_sent =
                cache.list(asker).into_iter().all(|object| reply(&Reply::Listed(object)));
            if all_sent {
                reply(&Reply::EndOfList);
            }
        }
        Request::Stat => {
            reply(&Reply::Stat(cache.stat()));
        }
    }
    Ok(())
}
