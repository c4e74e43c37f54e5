//! The text format of `db_dump` (Berkeley DB) and `mdb_dump` (LMDB), version 3.
//!
//! ```text
//! VERSION=3
//! format=bytevalue        or print
//! database=NAME
//! type=btree
//! HEADER=END
//!  6b6579                 a key, after one blank
//!  76616c7565             its value, after one blank
//! DATA=END
//! ```
//!
//! A dump is one such section after the other, one for each tree. Header lines that are not known
//! here (page and map sizes) are passed over when reading. A name that has no place in a line of
//! its own is written as `vellum-database=`, in the encoding `print`.

use std::io::{self, BufRead, Write};

use crate::key_text;

/// How the bytes of keys and values are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Two hexadecimal digits for each byte.
    ByteValue,
    /// Printable ASCII as it is, the rest escaped.
    Print,
}

/// Writes one section after the other.
pub struct Writer<W> {
    sink: W,
    encoding: Encoding,
    line: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// Writes to `sink`.
    pub fn new(sink: W, encoding: Encoding) -> Self {
        Self { sink, encoding, line: Vec::new() }
    }

    /// Starts the section of a tree.
    pub fn begin(&mut self, tree: &str) -> io::Result<()> {
        let format = match self.encoding {
            Encoding::ByteValue => "bytevalue",
            Encoding::Print => "print",
        };
        let database = match tree.contains(['\n', '\r']) {
            true => format!("vellum-database={}", key_text::printable(tree.as_bytes())),
            false => format!("database={tree}"),
        };
        write!(self.sink, "VERSION=3\nformat={format}\n{database}\ntype=btree\nHEADER=END\n")
    }

    /// Begins an entry: writes its key. Its value follows in bits.
    pub fn key(&mut self, key: &[u8]) -> io::Result<()> {
        self.sink.write_all(b" ")?;
        self.bits(key)?;
        self.sink.write_all(b"\n ")
    }

    /// Writes bytes of a value.
    pub fn bits(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.line.clear();
        match self.encoding {
            Encoding::ByteValue => key_text::push_hex(bytes, &mut self.line),
            Encoding::Print => key_text::push_printable(bytes, &mut self.line),
        }
        self.sink.write_all(&self.line)
    }

    /// Ends an entry.
    pub fn end_entry(&mut self) -> io::Result<()> {
        self.sink.write_all(b"\n")
    }

    /// Ends the section.
    pub fn end(&mut self) -> io::Result<()> {
        self.sink.write_all(b"DATA=END\n")
    }

    /// Hands over what is buffered.
    pub fn finish(mut self) -> io::Result<()> {
        self.sink.flush()
    }
}

/// A key and its value.
pub type Entry = (Vec<u8>, Vec<u8>);

/// Why a dump cannot be read on.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The text is not a dump.
    #[error("line {line}: {problem}")]
    Format {
        /// Counted from 1.
        line: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// The text could not be read.
    #[error("reading the dump: {0}")]
    Io(#[from] io::Error),
}

/// Reads one section after the other.
pub struct Reader<R> {
    source: R,
    line: Vec<u8>,
    number: u64,
    encoding: Encoding,
    ignored: Vec<String>,
}

impl<R: BufRead> Reader<R> {
    /// Reads from `source`.
    pub fn new(source: R) -> Self {
        let (line, encoding, ignored) = (Vec::new(), Encoding::ByteValue, Vec::new());
        Self { source, line, number: 0, encoding, ignored }
    }

    /// What the last header asks for that cannot be had, a sentence each.
    pub fn ignored(&self) -> &[String] {
        &self.ignored
    }

    /// The number of the line read last, counted from 1.
    pub fn line_number(&self) -> u64 {
        self.number
    }

    /// Reads the header of the next section. `None` at the end of the dump; otherwise the name of
    /// the tree, if the header has one.
    ///
    /// # Errors
    /// When the text is not a header that this program can read.
    pub fn section(&mut self) -> Result<Option<Option<String>>, ReadError> {
        loop {
            if !self.next_line()? {
                return Ok(None);
            }
            if !self.line.is_empty() {
                break;
            }
        }
        if self.line != b"VERSION=3" {
            let problem = match self.line.starts_with(b"VERSION=") {
                true => "only VERSION=3 of the dump format can be read",
                false => "a dump starts with VERSION=3; is this the output of a dump command?",
            };
            return Err(self.problem(problem));
        }
        let mut name = None;
        let mut format = None;
        self.ignored.clear();
        loop {
            if !self.next_line()? {
                return Err(self.problem("the dump ends inside a header"));
            }
            let line = String::from_utf8_lossy(&self.line).into_owned();
            match line.split_once('=') {
                Some(("HEADER", "END")) => break,
                Some(("format", "bytevalue")) => format = Some(Encoding::ByteValue),
                Some(("format", "print")) => format = Some(Encoding::Print),
                Some(("database", value)) => name = Some(value.to_string()),
                Some(("vellum-database", value)) => {
                    let bytes = key_text::from_printable(value.as_bytes());
                    let text = bytes.and_then(|bytes| String::from_utf8(bytes).ok());
                    let problem = "the name of the tree has a broken escape";
                    name = Some(text.ok_or_else(|| self.problem(problem))?);
                }
                Some((flag @ ("integerkey" | "reversekey"), "1")) => {
                    let line = self.number;
                    self.ignored.push(format!(
                        "line {line}: {flag}=1 is ignored: keys stand in the order of their bytes"
                    ));
                }
                Some(("type", "btree" | "hash")) => {}
                Some(("duplicates" | "dupsort", "1")) => {
                    return Err(self.problem("several values for one key cannot be stored"));
                }
                Some((key @ ("format" | "type"), value)) => {
                    return Err(self.problem(&format!("{key}={value} cannot be read")));
                }
                Some(_) => {}
                None => return Err(self.problem("a header line is NAME=VALUE")),
            }
        }
        self.encoding = format.unwrap_or(Encoding::ByteValue);
        Ok(Some(name))
    }

    /// Reads the next entry of the section; `None` at its end.
    ///
    /// # Errors
    /// When the text is not an entry.
    pub fn entry(&mut self) -> Result<Option<Entry>, ReadError> {
        if !self.next_line()? {
            return Err(self.problem("the dump ends before DATA=END: it is cut off"));
        }
        if self.line == b"DATA=END" {
            return Ok(None);
        }
        let key = self.bytes()?;
        if !self.next_line()? || self.line == b"DATA=END" {
            return Err(self.problem("the last key has no value"));
        }
        Ok(Some((key, self.bytes()?)))
    }

    /// Decodes the current line.
    fn bytes(&self) -> Result<Vec<u8>, ReadError> {
        let Some(text) = self.line.strip_prefix(b" ") else {
            return Err(self.problem("a line of data starts with one blank"));
        };
        match self.encoding {
            Encoding::ByteValue => key_text::from_hex(text)
                .ok_or_else(|| self.problem("bytes are two hexadecimal digits each")),
            Encoding::Print => key_text::from_printable(text).ok_or_else(|| {
                self.problem("behind a backslash comes another, or two hexadecimal digits")
            }),
        }
    }

    /// Reads a line without its line break; false at the end.
    fn next_line(&mut self) -> io::Result<bool> {
        self.line.clear();
        let length = self.source.read_until(b'\n', &mut self.line)?;
        if length == 0 {
            return Ok(false);
        }
        self.number += 1;
        if self.line.ends_with(b"\n") {
            self.line.pop();
        }
        if self.line.ends_with(b"\r") {
            self.line.pop();
        }
        Ok(true)
    }

    fn problem(&self, problem: &str) -> ReadError {
        ReadError::Format { line: self.number, problem: problem.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<(String, Entry)>, ReadError> {
        let mut reader = Reader::new(text.as_bytes());
        let mut entries = Vec::new();
        while let Some(name) = reader.section()? {
            while let Some(entry) = reader.entry()? {
                entries.push((name.clone().unwrap_or_default(), entry));
            }
        }
        Ok(entries)
    }

    #[test]
    fn what_is_written_is_read() {
        let all: Vec<u8> = (0..=255).collect();
        for encoding in [Encoding::ByteValue, Encoding::Print] {
            let mut text = Vec::new();
            let mut writer = Writer::new(&mut text, encoding);
            for tree in ["a", "b c", "d\\\r\ne"] {
                writer.begin(tree).unwrap();
                for (key, value) in [(&b""[..], &all[..]), (&all, b"")] {
                    writer.key(key).unwrap();
                    value.chunks(100).for_each(|bits| writer.bits(bits).unwrap());
                    writer.end_entry().unwrap();
                }
                writer.end().unwrap();
            }
            writer.finish().unwrap();
            let entries = read(std::str::from_utf8(&text).unwrap()).unwrap();
            let expected = ["a", "b c", "d\\\r\ne"].iter().flat_map(|tree| {
                let name = (*tree).to_string();
                [(name.clone(), (vec![], all.clone())), (name, (all.clone(), vec![]))]
            });
            assert_eq!(entries, expected.collect::<Vec<_>>());
        }
    }

    #[test]
    fn foreign_header_lines_are_passed_over() {
        let text = "VERSION=3\nformat=print\ntype=btree\nmapsize=1048576\nmaxreaders=126\n\
                    db_pagesize=4096\nHEADER=END\n a\\00\n b\\\\\nDATA=END\n";
        assert_eq!(read(text).unwrap(), [(String::new(), (b"a\0".to_vec(), b"b\\".to_vec()))]);
        assert!(read("").unwrap().is_empty());
    }

    #[test]
    fn bad_lines_are_named_by_number() {
        let line_of = |text: &str| match read(text) {
            Err(ReadError::Format { line, .. }) => line,
            other => panic!("{text:?}: {other:?}"),
        };
        let head = "VERSION=3\nformat=bytevalue\nHEADER=END\n";
        assert_eq!(line_of("hello\n"), 1);
        assert_eq!(line_of("VERSION=2\n"), 1);
        assert_eq!(line_of("VERSION=3\nnonsense\n"), 2);
        assert_eq!(line_of("VERSION=3\ntype=recno\n"), 2);
        assert_eq!(line_of("VERSION=3\nduplicates=1\n"), 2);
        assert_eq!(line_of("VERSION=3\nvellum-database=a\\\n"), 2);
        assert_eq!(line_of("VERSION=3\nformat=print\n"), 2);
        assert_eq!(line_of(&format!("{head} 00\n 0\nDATA=END\n")), 5);
        assert_eq!(line_of(&format!("{head} 00\n zz\nDATA=END\n")), 5);
        assert_eq!(line_of(&format!("{head} 00\nDATA=END\n")), 5);
        assert_eq!(line_of(&format!("{head}00\n")), 4);
        assert_eq!(line_of(&format!("{head} 00\n 00\n")), 5);
    }
}
