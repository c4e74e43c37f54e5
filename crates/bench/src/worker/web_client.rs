//! A client of a web server: connections that fetch pages one after the other, and check each.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use super::whole_file::sum;
use crate::workload::values::Random;
use crate::workload::{Measured, Plan, drive_threads};

/// The longest head of a response.
const LONGEST: usize = 4 << 10;

/// The shortest buffer for a response.
const PIECE: usize = 64 << 10;

/// The end of a head.
const END: &[u8] = b"\r\n\r\n";

/// What a server serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Site {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its pages.
    pub pages: Vec<Page>,
}

/// A page, and what it is known by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Page {
    /// Its name, without a slash.
    pub name: String,
    /// Its bytes.
    pub length: usize,
    /// The sum of the first words of each 4 KiB.
    pub sum: u64,
}

impl Page {
    /// A page of these bytes.
    pub fn new(name: String, bytes: &[u8]) -> Page {
        Page { name, length: bytes.len(), sum: sum(bytes) }
    }
}

impl Site {
    /// Fetches pages at random. Each thread has a connection, and asks again when it has checked
    /// the page before. An operation is a page.
    ///
    /// # Errors
    /// If the server cannot be reached, and the first page that is not as it should be.
    pub fn fetch(&self, plan: &Plan) -> Result<Measured> {
        ensure!(!self.pages.is_empty(), "the site has no pages");
        drive_threads(plan, |_| {
            let mut connection = Connection::new(self.address)?;
            Ok(move |random: &mut Random| {
                let page = &self.pages[random.below(self.pages.len() as u64) as usize];
                let checked = connection.ask(page);
                checked.with_context(|| format!("fetching '{}'", page.name))?;
                Ok(1)
            })
        })
    }
}

/// A connection that is kept alive.
struct Connection {
    stream: TcpStream,
    /// Of a response: as long as the longest one so far.
    bytes: Vec<u8>,
}

impl Connection {
    fn new(address: SocketAddr) -> Result<Connection> {
        let stream = TcpStream::connect(address).context("connecting")?;
        stream.set_nodelay(true)?;
        Ok(Connection { stream, bytes: vec![0; PIECE] })
    }

    /// Fetches a page, and checks it.
    fn ask(&mut self, page: &Page) -> Result<()> {
        let request = format!("GET /{} HTTP/1.1\r\nHost: localhost\r\n\r\n", page.name);
        self.stream.write_all(request.as_bytes())?;
        let (start, received) = self.receive_head()?;
        let length = length(&self.bytes[..start])?;
        ensure!(length == page.length, "{length} bytes, and not {}", page.length);
        let end = start + length;
        ensure!(received <= end, "more bytes than the response's head says");
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.stream.read_exact(&mut self.bytes[received..end])?;
        ensure!(sum(&self.bytes[start..end]) == page.sum, "other bytes");
        Ok(())
    }

    /// Receives the head of a response, and what comes with it. Returns where the head ends, and
    /// where what was received does.
    fn receive_head(&mut self) -> Result<(usize, usize)> {
        let mut received = 0;
        loop {
            let count = self.stream.read(&mut self.bytes[received..])?;
            ensure!(count > 0, "the server has closed the connection");
            received += count;
            let begun = &self.bytes[..received.min(LONGEST)];
            if let Some(at) = begun.windows(END.len()).position(|bytes| bytes == END) {
                return Ok((at + END.len(), received));
            }
            ensure!(received < LONGEST, "a head of more than {LONGEST} bytes");
        }
    }
}

/// The length of the body that follows this head.
fn length(head: &[u8]) -> Result<usize> {
    let text = str::from_utf8(head).context("the head of the response is no text")?;
    let (status, fields) = text.split_once("\r\n").unwrap_or((text, ""));
    if !status.starts_with("HTTP/1.1 200 ") {
        bail!("the server says '{status}'");
    }
    let mut fields = fields.lines().filter_map(|line| line.split_once(':'));
    let value = fields.find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    let value = value.context("the response has no length")?.1.trim();
    value.parse().with_context(|| format!("'{value}' is no length"))
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};
    use std::thread;

    use super::*;

    /// What a client says to a server that answers each request with these bytes.
    fn answered(answer: &'static str) -> Result<Measured> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1 << 10];
            while stream.read(&mut request).is_ok_and(|count| count > 0) {
                if stream.write_all(answer.as_bytes()).is_err() {
                    break;
                }
            }
        });
        let site = Site { address, pages: vec![Page::new("a".to_owned(), b"12345678")] };
        let fetched = site.fetch(&Plan { threads: 1, seconds: 0.05, seed: 1 });
        server.join().unwrap();
        fetched
    }

    #[test]
    fn pages_are_counted() {
        let answer = "HTTP/1.1 200 OK\r\ncontent-LENGTH: 8\r\n\r\n12345678";
        assert!(answered(answer).unwrap().operations >= 1);
    }

    #[test]
    fn wrong_answers_are_told() {
        let cases = [
            ("HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n12345679", "other bytes"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n123456789", "more bytes"),
            ("HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n1234567", "7 bytes, and not 8"),
            ("HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "'x' is no length"),
            ("HTTP/1.1 200 OK\r\n\r\n12345678", "no length"),
            ("HTTP/1.1 500 No\r\nContent-Length: 8\r\n\r\n12345678", "HTTP/1.1 500 No"),
        ];
        for (answer, complaint) in cases {
            let error = format!("{:#}", answered(answer).unwrap_err());
            assert!(error.contains("fetching 'a'") && error.contains(complaint), "{error}");
        }
    }
}
