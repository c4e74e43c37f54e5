//! The emulator's monitor: it says what the processors of a machine that hangs are doing.

use std::io::{self, Read as _, Write as _};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::process;
use std::time::Duration;

/// The end of every answer.
const PROMPT: &[u8] = b"(qemu) ";

/// The time for an answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// The name of the monitor's socket, which is in no file system: a path may be too long for a
/// socket. A lab runs one machine at a time.
fn name() -> String {
    format!("vellum-lab-{}", process::id())
}

/// The emulator's arguments for a monitor.
pub fn arguments() -> [String; 4] {
    let socket = format!("socket,id=monitor,path={},abstract=on,server=on,wait=off", name());
    ["-chardev".to_owned(), socket, "-mon".to_owned(), "chardev=monitor,mode=readline".to_owned()]
}

/// Where the processors are, in one line for each: the next instruction, and whether it waits for
/// an interrupt.
///
/// # Errors
/// If the emulator does not answer, because it hangs itself.
pub fn processors() -> io::Result<Vec<String>> {
    let mut monitor = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name())?)?;
    monitor.set_read_timeout(Some(PATIENCE))?;
    answer(&mut monitor)?;
    monitor.write_all(b"info registers -a\n")?;
    Ok(excerpt(&answer(&mut monitor)?))
}

/// Reads to the next prompt.
fn answer(monitor: &mut UnixStream) -> io::Result<String> {
    let mut text = Vec::new();
    let mut part = [0; 4096];
    while !text.ends_with(PROMPT) {
        match monitor.read(&mut part)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            length => text.extend(&part[..length]),
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// The numbers of the processors with the registers that say where they are.
fn excerpt(registers: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for line in registers.lines().map(str::trim) {
        if line.starts_with("CPU#") {
            found.push(line.to_owned());
        } else if let (Some(last), true) = (found.last_mut(), line.starts_with("RIP=")) {
            last.push_str(": ");
            last.push_str(line);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_for_each_processor() {
        let text = "info registers -a\r\n\r\nCPU#0\r\nRAX=0 RBX=1\r\nRIP=ffff RFL=2 HLT=1\r\n\
                    ES =0\r\n\r\nCPU#1\r\nRIP=400 RFL=2 HLT=0\r\n(qemu) ";
        assert_eq!(excerpt(text), ["CPU#0: RIP=ffff RFL=2 HLT=1", "CPU#1: RIP=400 RFL=2 HLT=0"]);
    }
}
