//! A small web server for the files of a folder, whose threads each wait for some connections.

use std::fs::File;
use std::io::{self, ErrorKind, IoSlice, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::sendfile;
use rustix::net::{SendFlags, send};

use super::http::{self, Get, Status};
use super::read_method::Way;

/// Bytes that are read from a file and sent at a time.
const PIECE: usize = 128 << 10;

/// Bytes that are read from a socket at a time.
const REQUEST: usize = 2 << 10;

/// Seconds that the server waits for a client that is to connect.
const PATIENCE: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };

/// How a file's bytes come to the socket.
#[derive(Clone, Copy, Debug)]
pub(super) enum Delivery<'a> {
    /// Read in pieces, into a buffer that is used again, and sent.
    Pieces,
    /// Mapped as a whole, and sent from there.
    Whole(Way<'a>),
    /// By `sendfile`.
    Sendfile,
}

/// A server for the files of a folder.
#[derive(Debug)]
pub(super) struct Server {
    folder: PathBuf,
    listener: TcpListener,
}

impl Server {
    /// One that listens at a port of this machine's own network.
    pub(super) fn new(folder: PathBuf) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("listening")?;
        Ok(Self { folder, listener })
    }

    /// Where it listens.
    pub(super) fn address(&self) -> Result<SocketAddr> {
        Ok(self.listener.local_addr()?)
    }

    /// Waits for so many connections, and serves them by so many threads until all are closed.
    pub(super) fn serve(
        &self,
        connections: usize,
        threads: usize,
        delivery: Delivery<'_>,
    ) -> Result<()> {
        let mut shares: Vec<Vec<Connection>> = (0..threads).map(|_| Vec::new()).collect();
        for number in 0..connections {
            shares[number % threads].push(Connection::new(self.accept()?)?);
        }
        std::thread::scope(|scope| {
            let serve = |share| scope.spawn(move || self.serve_share(share, delivery));
            let all: Vec<_> = shares.into_iter().map(serve).collect();
            all.into_iter().try_for_each(|thread| thread.join().expect("a thread does not panic"))
        })
    }

    fn accept(&self) -> Result<TcpStream> {
        let mut waits = [PollFd::new(&self.listener, PollFlags::IN)];
        ensure!(poll(&mut waits, Some(&PATIENCE))? > 0, "no client connects");
        Ok(self.listener.accept()?.0)
    }

    /// The work of a thread.
    fn serve_share(&self, mut open: Vec<Connection>, delivery: Delivery<'_>) -> Result<()> {
        let mut buffer = vec![0; PIECE];
        while !open.is_empty() {
            let waits =
                open.iter().map(|connection| PollFd::new(&connection.stream, PollFlags::IN));
            let mut waits: Vec<PollFd<'_>> = waits.collect();
            poll(&mut waits, None)?;
            let ready = waits.iter().map(|wait| !wait.revents().is_empty());
            let ready: Vec<bool> = ready.collect();
            let mut still_open = Vec::new();
            for (mut connection, is_ready) in open.into_iter().zip(ready) {
                if !is_ready || self.answer(&mut connection, delivery, &mut buffer)? {
                    still_open.push(connection);
                }
            }
            open = still_open;
        }
        Ok(())
    }

    /// Answers what has come. `false`: the connection has ended.
    fn answer(
        &self,
        connection: &mut Connection,
        delivery: Delivery<'_>,
        buffer: &mut Vec<u8>,
    ) -> Result<bool> {
        match self.answer_all(connection, delivery, buffer) {
            // The client went away.
            Err(error) if is_lost(&error) => Ok(false),
            result => result,
        }
    }

    fn answer_all(
        &self,
        connection: &mut Connection,
        delivery: Delivery<'_>,
        buffer: &mut Vec<u8>,
    ) -> Result<bool> {
        if !connection.receive()? {
            return Ok(false);
        }
        while let Some(head) = connection.next_head() {
            let stream = &connection.stream;
            let keeps_alive = match http::understand(&head) {
                Ok(get) => self.send(stream, &get, delivery, buffer)?,
                Err(status) => refuse(stream, status, false)?,
            };
            if !keeps_alive {
                return Ok(false);
            }
        }
        if connection.received.len() > http::LONGEST {
            return refuse(&connection.stream, Status::HeadTooLong, false);
        }
        Ok(true)
    }

    /// Sends a file. `false`: the connection ends with it.
    fn send(
        &self,
        stream: &TcpStream,
        get: &Get,
        delivery: Delivery<'_>,
        buffer: &mut Vec<u8>,
    ) -> Result<bool> {
        let path = self.folder.join(&get.name);
        let file = match File::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return refuse(stream, Status::NotFound, get.keeps_alive);
            }
            opened => opened.with_context(|| format!("opening {}", path.display()))?,
        };
        match delivery {
            Delivery::Pieces => send_pieces(stream, get, file, buffer)?,
            Delivery::Whole(way) => way.use_once(file, buffer, |bytes| {
                let head = http::head_of_file(bytes.len(), get.keeps_alive);
                send_all(stream, &mut [IoSlice::new(head.as_bytes()), IoSlice::new(bytes)])
            })??,
            Delivery::Sendfile => send_file(stream, get, &file)?,
        }
        Ok(get.keeps_alive)
    }
}

fn send_pieces(stream: &TcpStream, get: &Get, mut file: File, buffer: &mut [u8]) -> Result<()> {
    let mut left = usize::try_from(file.metadata()?.len())?;
    let head = http::head_of_file(left, get.keeps_alive);
    let mut head = head.as_bytes();
    while left > 0 || !head.is_empty() {
        let piece = &mut buffer[..left.min(PIECE)];
        file.read_exact(piece)?;
        send_all(stream, &mut [IoSlice::new(head), IoSlice::new(piece)])?;
        left -= piece.len();
        head = &[];
    }
    Ok(())
}

fn send_file(stream: &TcpStream, get: &Get, file: &File) -> Result<()> {
    let length = usize::try_from(file.metadata()?.len())?;
    let head = http::head_of_file(length, get.keeps_alive);
    // The file follows in the same packet.
    let more = if length > 0 { SendFlags::MORE } else { SendFlags::empty() };
    let mut rest = head.as_bytes();
    while !rest.is_empty() {
        let sent = send(stream, rest, SendFlags::NOSIGNAL | more)?;
        rest = &rest[sent..];
    }
    let mut left = length;
    while left > 0 {
        let sent = sendfile(stream, file, None, left)?;
        ensure!(sent > 0, "the file has become shorter");
        left -= sent;
    }
    Ok(())
}

/// Sends all of these bytes, in one call if the system takes them.
fn send_all(mut stream: &TcpStream, mut bytes: &mut [IoSlice<'_>]) -> Result<()> {
    IoSlice::advance_slices(&mut bytes, 0);
    while !bytes.is_empty() {
        match stream.write_vectored(bytes) {
            Ok(0) => return Err(io::Error::from(ErrorKind::WriteZero).into()),
            Ok(sent) => IoSlice::advance_slices(&mut bytes, sent),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn refuse(mut stream: &TcpStream, status: Status, keeps_alive: bool) -> Result<bool> {
    stream.write_all(status.response(keeps_alive).as_bytes())?;
    Ok(keeps_alive)
}

/// Whether the client has closed the connection before it had its answer.
fn is_lost(error: &anyhow::Error) -> bool {
    let kind = match (error.downcast_ref::<io::Error>(), error.downcast_ref::<rustix::io::Errno>())
    {
        (Some(error), _) => error.kind(),
        (_, Some(errno)) => errno.kind(),
        _ => return false,
    };
    matches!(kind, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}

/// A connection, and what has come of requests that are not answered.
struct Connection {
    stream: TcpStream,
    received: Vec<u8>,
}

impl Connection {
    fn new(stream: TcpStream) -> Result<Self> {
        // No answer waits until the client has confirmed the one before.
        stream.set_nodelay(true)?;
        Ok(Self { stream, received: Vec::new() })
    }

    /// Receives what is there. `false`: the client has closed its end.
    fn receive(&mut self) -> Result<bool> {
        let mut bytes = [0; REQUEST];
        let count = self.stream.read(&mut bytes)?;
        self.received.extend(&bytes[..count]);
        Ok(count > 0)
    }

    /// Takes the head of the next request, if all of it is there.
    fn next_head(&mut self) -> Option<Vec<u8>> {
        let end = http::end_of_head(&self.received)?;
        Some(self.received.drain(..end).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;

    use vellum_bench::worker::{Page, Site};
    use vellum_bench::workload::Plan;
    use vellum_bench::workload::values::fill;
    use vellum_dax::Backend;

    use super::super::read_method::heap;
    use super::*;

    fn server() -> (tempfile::TempDir, Server, Vec<Page>) {
        let folder = tempfile::tempdir().unwrap();
        let lengths = [0, 1, 4_096, 300_001, 1 << 20];
        let pages = lengths.into_iter().enumerate().map(|(number, length)| {
            let mut bytes = vec![0; length];
            fill(number as u64, &mut bytes);
            std::fs::write(folder.path().join(number.to_string()), &bytes).unwrap();
            Page::new(number.to_string(), &bytes)
        });
        let pages = pages.collect();
        let server = Server::new(folder.path().to_owned()).unwrap();
        (folder, server, pages)
    }

    /// What the server answers to these bytes, until it has closed the connection.
    fn answer(server: &Server, request: &[u8]) -> String {
        let address = server.address().unwrap();
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| server.serve(1, 1, Delivery::Pieces));
            let mut stream = TcpStream::connect(address).unwrap();
            // In parts, as a network may do it.
            for part in request.chunks(request.len().div_ceil(3)) {
                stream.write_all(part).unwrap();
            }
            stream.shutdown(Shutdown::Write).unwrap();
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).unwrap();
            serving.join().unwrap().unwrap();
            String::from_utf8_lossy(&answer).into_owned()
        })
    }

    #[test]
    fn every_delivery_brings_all_pages() {
        let (_folder, server, pages) = server();
        let by_mmap = heap(Backend::Mmap, None).unwrap();
        let whole = [Way::Read, Way::Heap(&by_mmap)].map(Delivery::Whole);
        let site = Site { address: server.address().unwrap(), pages };
        for delivery in [Delivery::Pieces, Delivery::Sendfile].into_iter().chain(whole) {
            for threads in [1, 2] {
                let plan = Plan { threads: 3, seconds: 0.1, seed: 1 };
                std::thread::scope(|scope| {
                    let serving = scope.spawn(|| server.serve(3, threads, delivery));
                    let fetched = site.fetch(&plan).unwrap();
                    assert!(fetched.operations >= 3, "{delivery:?}");
                    serving.join().unwrap().unwrap();
                });
            }
        }
    }

    #[test]
    fn a_client_notices_other_bytes() {
        let (folder, server, pages) = server();
        let bytes = std::fs::read(folder.path().join("3")).unwrap();
        let mut other = bytes.clone();
        other[8_192] ^= 1;
        let page = |bytes| Page::new("3".to_owned(), bytes);
        let cases = [
            (page(&other), "other bytes"),
            (page(&bytes[1..]), "300001 bytes"),
            (Page { name: "none".to_owned(), ..pages[1].clone() }, "404 Not Found"),
        ];
        for (page, complaint) in cases {
            let site = Site { address: server.address().unwrap(), pages: vec![page] };
            std::thread::scope(|scope| {
                let serving = scope.spawn(|| server.serve(1, 1, Delivery::Pieces));
                let plan = Plan { threads: 1, seconds: 0.1, seed: 1 };
                let error = format!("{:#}", site.fetch(&plan).unwrap_err());
                assert!(error.contains(complaint), "{error}");
                serving.join().unwrap().unwrap();
            });
        }
    }

    #[test]
    fn requests_are_answered_in_turn() {
        let (_folder, server, _) = server();
        let file = "GET /1 HTTP/1.1\r\nHost: x\r\n\r\n";
        let missing = "GET /none HTTP/1.1\r\nHost: x\r\n\r\n";
        let last = "GET /1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        let text = answer(&server, [file, missing, last].concat().as_bytes());
        let lines = text.split("HTTP/1.1 ").skip(1).map(|one| &one[..3]);
        assert_eq!(lines.collect::<Vec<_>>(), ["200", "404", "200"], "{text}");
        assert_eq!(text.matches("Connection: close").count(), 1, "{text}");
    }

    #[test]
    fn a_refused_request_ends_its_connection() {
        let (_folder, server, _) = server();
        let text = answer(&server, b"PUT /1 HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(text.starts_with("HTTP/1.1 501 ") && text.contains("Connection: close"), "{text}");
        let endless = [b"GET /1 HTTP/1.1\r\nHost: ".to_vec(), vec![b'x'; http::LONGEST]].concat();
        assert!(answer(&server, &endless).starts_with("HTTP/1.1 431 "));
    }
}
