//! As much of HTTP/1.1 as a server of static files needs: requests for a file by its name, and the
//! heads of responses. Not there: names with `%`, ranges, conditions, requests with a body.

/// The longest head of a request.
pub(super) const LONGEST: usize = 8 << 10;

/// A request for a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Get {
    /// The file's name in the server's folder.
    pub(super) name: String,
    /// Whether the client may ask again on the same connection.
    pub(super) keeps_alive: bool,
}

/// A response without a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    BadRequest,
    NotFound,
    HeadTooLong,
    NotImplemented,
    Version,
}

impl Status {
    fn line(self) -> &'static str {
        match self {
            Status::BadRequest => "400 Bad Request",
            Status::NotFound => "404 Not Found",
            Status::HeadTooLong => "431 Request Header Fields Too Large",
            Status::NotImplemented => "501 Not Implemented",
            Status::Version => "505 HTTP Version Not Supported",
        }
    }

    /// The whole response.
    pub(super) fn response(self, keeps_alive: bool) -> String {
        head(self.line(), 0, keeps_alive)
    }
}

/// The head of a response with a file.
pub(super) fn head_of_file(length: usize, keeps_alive: bool) -> String {
    head("200 OK", length, keeps_alive)
}

fn head(line: &str, length: usize, keeps_alive: bool) -> String {
    let connection = if keeps_alive { "" } else { "Connection: close\r\n" };
    format!(
        "HTTP/1.1 {line}\r\nContent-Type: application/octet-stream\r\n\
         Content-Length: {length}\r\n{connection}\r\n"
    )
}

/// Where the head ends that the bytes begin with, if all of it is there.
pub(super) fn end_of_head(bytes: &[u8]) -> Option<usize> {
    bytes.windows(4).position(|four| four == b"\r\n\r\n").map(|at| at + 4)
}

/// Understands the head of a request, with the empty line at its end.
pub(super) fn understand(head: &[u8]) -> Result<Get, Status> {
    let text = str::from_utf8(head).map_err(|_| Status::BadRequest)?;
    let mut lines = text.split_terminator("\r\n");
    let words: Vec<&str> = lines.next().unwrap_or_default().split(' ').collect();
    let [method, target, version] = words[..] else { return Err(Status::BadRequest) };
    let is_newer = match version {
        "HTTP/1.1" => true,
        "HTTP/1.0" => false,
        _ if version.starts_with("HTTP/") => return Err(Status::Version),
        _ => return Err(Status::BadRequest),
    };
    if method != "GET" {
        return Err(Status::NotImplemented);
    }
    let (mut keeps_alive, mut has_host) = (is_newer, !is_newer);
    for line in lines.take_while(|line| !line.is_empty()) {
        let (name, value) = line.split_once(':').ok_or(Status::BadRequest)?;
        let value = value.trim_matches([' ', '\t']);
        match name.to_ascii_lowercase().as_str() {
            "host" => has_host = true,
            "connection" if lists(value, "close") => keeps_alive = false,
            "content-length" if value != "0" => return Err(Status::BadRequest),
            "transfer-encoding" => return Err(Status::NotImplemented),
            name if name.is_empty() || name.contains([' ', '\t']) => {
                return Err(Status::BadRequest);
            }
            _ => {}
        }
    }
    if !has_host {
        return Err(Status::BadRequest);
    }
    let name = target.strip_prefix('/').ok_or(Status::BadRequest)?;
    if name.contains(['%', '\0', '?', '#']) {
        return Err(Status::BadRequest);
    }
    // The server serves the files of this folder alone.
    if name.is_empty() || name == "." || name == ".." || name.contains('/') {
        return Err(Status::NotFound);
    }
    Ok(Get { name: name.to_owned(), keeps_alive })
}

/// Whether a word is in a list, in any case.
fn lists(value: &str, word: &str) -> bool {
    value.split(',').any(|one| one.trim_matches([' ', '\t']).eq_ignore_ascii_case(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(head: &str) -> Result<(String, bool), Status> {
        let get = understand(head.as_bytes())?;
        Ok((get.name, get.keeps_alive))
    }

    #[test]
    fn requests_for_files_are_understood() {
        let cases = [
            ("GET /a.html HTTP/1.1\r\nHost: here\r\n\r\n", "a.html", true),
            ("GET /a HTTP/1.1\r\nhOST:\r\nAccept: */*\r\n\r\n", "a", true),
            ("GET /a HTTP/1.1\r\nHost: x\r\nConnection: foo, Close\r\n\r\n", "a", false),
            ("GET /a HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", "a", true),
            ("GET /..a HTTP/1.0\r\n\r\n", "..a", false),
        ];
        for (head, name, keeps_alive) in cases {
            assert_eq!(asked(head), Ok((name.to_owned(), keeps_alive)), "{head:?}");
        }
    }

    #[test]
    fn other_requests_are_refused() {
        let host = "\r\nHost: x\r\n\r\n";
        let cases = [
            (format!("POST /a HTTP/1.1{host}"), Status::NotImplemented),
            (format!("GET /a HTTP/2.0{host}"), Status::Version),
            (format!("GET /a FTP/1.1{host}"), Status::BadRequest),
            (format!("GET  /a HTTP/1.1{host}"), Status::BadRequest),
            (format!("GET a HTTP/1.1{host}"), Status::BadRequest),
            (format!("GET /%61 HTTP/1.1{host}"), Status::BadRequest),
            (format!("GET / HTTP/1.1{host}"), Status::NotFound),
            (format!("GET /.. HTTP/1.1{host}"), Status::NotFound),
            (format!("GET /../a HTTP/1.1{host}"), Status::NotFound),
            ("GET /a HTTP/1.1\r\n\r\n".to_owned(), Status::BadRequest),
            ("GET /a HTTP/1.1\r\nHost: x\r\nno field\r\n\r\n".to_owned(), Status::BadRequest),
            ("GET /a HTTP/1.1\r\nHost : x\r\n\r\n".to_owned(), Status::BadRequest),
            (format!("GET /a HTTP/1.1\r\nContent-Length: 5{host}"), Status::BadRequest),
            (format!("GET /a HTTP/1.1\r\nTransfer-Encoding: x{host}"), Status::NotImplemented),
            ("\r\n\r\n".to_owned(), Status::BadRequest),
        ];
        for (head, status) in cases {
            assert_eq!(asked(&head), Err(status), "{head:?}");
        }
        assert_eq!(understand(b"GET /\xff HTTP/1.1\r\n\r\n"), Err(Status::BadRequest));
    }

    #[test]
    fn a_head_ends_with_an_empty_line() {
        assert_eq!(end_of_head(b"GET / HTTP/1.1\r\n\r"), None);
        assert_eq!(end_of_head(b"GET / HTTP/1.1\r\n\r\nGET"), Some(18));
    }

    #[test]
    fn responses_have_a_length() {
        let kept = "HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n\
                    Content-Length: 5\r\n\r\n";
        assert_eq!(head_of_file(5, true), kept);
        let closed = Status::NotFound.response(false);
        assert!(closed.starts_with("HTTP/1.1 404 Not Found\r\n"), "{closed}");
        assert!(closed.ends_with("Content-Length: 0\r\nConnection: close\r\n\r\n"), "{closed}");
    }
}
