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
//! A dump has one such section for each tree. The reader skips header lines that it does not know
//! (page and map sizes). The writer puts a name with line breaks into a line `vellum-database=`, in
//! the encoding `print`.

use std::io::{self, BufRead, Read, Write};

use crate::key_text;

/// The encoding of the bytes of keys and values.
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

    /// Begins an entry: writes its key. The caller writes its value with [`Writer::value_part`].
    pub fn key(&mut self, key: &[u8]) -> io::Result<()> {
        self.sink.write_all(b" ")?;
        self.value_part(key)?;
        self.sink.write_all(b"\n ")
    }

    /// Writes bytes of a value.
    pub fn value_part(&mut self, bytes: &[u8]) -> io::Result<()> {
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

    /// Flushes the sink.
    pub fn finish(mut self) -> io::Result<()> {
        self.sink.flush()
    }
}

/// Why the reader cannot go on.
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

/// The longest line of a header, and the longest key as text. No store takes a longer key.
const LINE_MAX: usize = 1 << 20;

/// Reads one section after the other. It keeps no more of a value in memory than the caller asks
/// for.
pub struct Reader<R> {
    source: R,
    line: Vec<u8>,
    number: u64,
    encoding: Encoding,
    ignored: Vec<String>,
    text: Text,
}

/// A line of data that is being read.
#[derive(Default)]
struct Text {
    position: Position,
    /// The beginning of an escape, or the first of two digits; the rest is not read yet.
    begun: Vec<u8>,
    /// The last byte was a carriage return. If the line ends here, it is not part of the line.
    is_return_held: bool,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Position {
    #[default]
    Ended,
    /// The reader has read a key. The line of its value comes next.
    BeforeValue,
    Inside,
}

impl<R: BufRead> Reader<R> {
    /// Reads from `source`.
    pub fn new(source: R) -> Self {
        let (line, encoding, ignored) = (Vec::new(), Encoding::ByteValue, Vec::new());
        Self { source, line, number: 0, encoding, ignored, text: Text::default() }
    }

    /// The settings of the last header that the reader ignores, a sentence each.
    pub fn ignored(&self) -> &[String] {
        &self.ignored
    }

    /// The number of the last line, counted from 1.
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
                true => "this program reads only VERSION=3 of the dump format",
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
                        "line {line}: {flag}=1 is ignored: the store orders keys by their bytes"
                    ));
                }
                Some(("type", "btree" | "hash")) => {}
                Some(("duplicates" | "dupsort", "1")) => {
                    return Err(self.problem("a store cannot have several values for one key"));
                }
                Some((key @ ("format" | "type"), value)) => {
                    return Err(self.problem(&format!("this program cannot read {key}={value}")));
                }
                Some(_) => {}
                None => return Err(self.problem("a header line must be NAME=VALUE")),
            }
        }
        self.encoding = format.unwrap_or(Encoding::ByteValue);
        Ok(Some(name))
    }

    /// Reads the key of the section's next entry; `None` at the end of the section. The caller has
    /// read the value of the entry before to its end.
    ///
    /// # Errors
    /// When the text is not an entry.
    pub fn key(&mut self) -> Result<Option<Vec<u8>>, ReadError> {
        match self.begin_text()? {
            Begun::Text => {}
            Begun::SectionEnd => return Ok(None),
            Begun::DumpEnd => {
                return Err(self.problem("the dump ends before DATA=END: it is cut off"));
            }
        }
        let mut key = Vec::new();
        if self.read_text(&mut key, LINE_MAX)? {
            return Err(self.problem("the key is longer than 1 MiB, which no store takes"));
        }
        self.text.position = Position::BeforeValue;
        Ok(Some(key))
    }

    /// Reads from the value of the last key's entry: appends to `bytes` until it has `most` bytes.
    /// True if the value has more.
    ///
    /// # Errors
    /// When the text is not a value.
    pub fn value(&mut self, bytes: &mut Vec<u8>, most: usize) -> Result<bool, ReadError> {
        if self.text.position == Position::BeforeValue {
            match self.begin_text()? {
                Begun::Text => {}
                Begun::SectionEnd | Begun::DumpEnd => {
                    return Err(self.problem("the last key has no value"));
                }
            }
        }
        self.read_text(bytes, most)
    }

    fn begin_text(&mut self) -> Result<Begun, ReadError> {
        if !self.fill()? {
            return Ok(Begun::DumpEnd);
        }
        if self.source.fill_buf()?.first() == Some(&b' ') {
            self.source.consume(1);
            self.number += 1;
            self.text = Text { position: Position::Inside, ..Text::default() };
            return Ok(Begun::Text);
        }
        match self.next_line()? && self.line == b"DATA=END" {
            true => Ok(Begun::SectionEnd),
            false => Err(self.problem("a line of data must start with one blank")),
        }
    }

    fn read_text(&mut self, bytes: &mut Vec<u8>, most: usize) -> Result<bool, ReadError> {
        while self.text.position == Position::Inside {
            let is_cut_off = !self.fill()?;
            let found = self.source.fill_buf()?;
            let end = found.iter().position(|letter| *letter == b'\n');
            let is_end = end == Some(0) || is_cut_off;
            if is_end {
                self.source.consume(usize::from(!is_cut_off));
                self.text.position = Position::Ended;
                return match self.text.begun.is_empty() {
                    true => Ok(false),
                    false => Err(self.broken()),
                };
            }
            if bytes.len() >= most {
                return Ok(true);
            }
            // Each letter stands for one byte at most, and so does a held carriage return.
            let room = most - bytes.len() - usize::from(self.text.is_return_held);
            let count = end.unwrap_or(found.len()).min(room);
            let decoded = self.text.decode(self.encoding, &found[..count], bytes);
            self.source.consume(count);
            if decoded.is_none() {
                return Err(self.broken());
            }
        }
        Ok(false)
    }

    /// Fills the source's buffer if it is empty; false at the end of the dump.
    fn fill(&mut self) -> io::Result<bool> {
        loop {
            match self.source.fill_buf() {
                Ok(found) => return Ok(!found.is_empty()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn broken(&self) -> ReadError {
        self.problem(match self.encoding {
            Encoding::ByteValue => "each byte must be two hexadecimal digits",
            Encoding::Print => {
                "a backslash must be followed by another one, or by two hexadecimal digits"
            }
        })
    }

    /// Reads a line without its line break; false at the end.
    fn next_line(&mut self) -> Result<bool, ReadError> {
        self.line.clear();
        let mut source = self.source.by_ref().take(LINE_MAX as u64);
        let length = source.read_until(b'\n', &mut self.line)?;
        if length == 0 {
            return Ok(false);
        }
        self.number += 1;
        if length == LINE_MAX {
            return Err(self.problem("the line is longer than 1 MiB, and is not a line of data"));
        }
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

/// What the reader finds where it expects a line of data.
enum Begun {
    Text,
    SectionEnd,
    DumpEnd,
}

impl Text {
    /// Appends the bytes that the line's next letters stand for. `None` if the letters are not
    /// valid.
    fn decode(&mut self, encoding: Encoding, text: &[u8], bytes: &mut Vec<u8>) -> Option<()> {
        // These letters do not include the line's end, so the carriage return is part of the line.
        if std::mem::take(&mut self.is_return_held) {
            self.decode_letters(encoding, b"\r", bytes)?;
        }
        let whole = text.strip_suffix(b"\r");
        self.is_return_held = whole.is_some();
        self.decode_letters(encoding, whole.unwrap_or(text), bytes)
    }

    fn decode_letters(
        &mut self,
        encoding: Encoding,
        mut text: &[u8],
        bytes: &mut Vec<u8>,
    ) -> Option<()> {
        let decode = match encoding {
            Encoding::ByteValue => key_text::push_from_hex,
            Encoding::Print => key_text::push_from_printable,
        };
        while let (false, [letter, rest @ ..]) = (self.begun.is_empty(), text) {
            self.begun.push(*letter);
            text = rest;
            let decoded = decode(&self.begun, bytes)?;
            self.begun.drain(..decoded);
        }
        let decoded = decode(text, bytes)?;
        self.begun.extend_from_slice(&text[decoded..]);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use super::*;

    type Entry = (Vec<u8>, Vec<u8>);

    /// Reads from a source that gives `step` letters at a time, and values by `step` bytes.
    fn read_by(text: &str, step: usize) -> Result<Vec<(String, Entry)>, ReadError> {
        let mut reader = Reader::new(BufReader::with_capacity(step, text.as_bytes()));
        let mut entries = Vec::new();
        while let Some(name) = reader.section()? {
            while let Some(key) = reader.key()? {
                let mut value = Vec::new();
                loop {
                    let most = value.len() + step;
                    let more = reader.value(&mut value, most)?;
                    assert!(value.len() <= most && (!more || value.len() == most));
                    if !more {
                        break;
                    }
                }
                entries.push((name.clone().unwrap_or_default(), (key, value)));
            }
        }
        Ok(entries)
    }

    /// Reads the text, whole and in parts. The result must be the same.
    fn read(text: &str) -> Result<Vec<(String, Entry)>, ReadError> {
        let whole = read_by(text, 1 << 16);
        for step in 1..8 {
            match (&whole, read_by(text, step)) {
                (Ok(whole), Ok(parts)) => assert_eq!(*whole, parts, "{step}"),
                (Err(whole), Err(parts)) => assert_eq!(whole.to_string(), parts.to_string()),
                (whole, parts) => panic!("{whole:?} and {parts:?} by {step}"),
            }
        }
        whole
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
                    value.chunks(100).for_each(|value_part| writer.value_part(value_part).unwrap());
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
    fn a_carriage_return_ends_a_line_with_its_break_only() {
        let text = "VERSION=3\r\nformat=print\r\nHEADER=END\r\n a\r\r\n \r\\0d\rb\r\nDATA=END\r\n";
        let entry = (b"a\r".to_vec(), b"\r\r\rb".to_vec());
        assert_eq!(read(text).unwrap(), [(String::new(), entry)]);
        let text = "VERSION=3\nHEADER=END\n 61\r\n \r\nDATA=END";
        assert_eq!(read(text).unwrap(), [(String::new(), (b"a".to_vec(), vec![]))]);
        assert!(read("VERSION=3\nHEADER=END\n 61\r\n 6\r1\nDATA=END\n").is_err());
    }

    #[test]
    fn lines_without_end_are_refused() {
        let head = "VERSION=3\nformat=print\nHEADER=END\n";
        let long = "k".repeat(LINE_MAX + 1);
        for text in [&long, &format!("{head} {long}\n v\n"), &format!("{head} k\n{long}\n")] {
            let error = read_by(text, 1 << 16).unwrap_err().to_string();
            assert!(error.contains("1 MiB"), "{error}");
        }
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
