//! What is said where nothing may be allocated.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::fmt::{self, Write as _};

use crate::sys::raw_system_call;

/// Ends the process, because the guest cannot go on, and nothing says what the program would see.
pub(crate) fn stop(reason: fmt::Arguments<'_>) -> ! {
    say(format_args!("a thread cannot go on in ring 0: {reason}"));
    // SAFETY: it ends the process.
    unsafe { libc::abort() }
}

/// A message, of at most so many bytes.
struct Text([u8; 512], usize);

impl Text {
    fn new(message: fmt::Arguments<'_>) -> Self {
        let mut text = Self([0; 512], 0);
        let _ = writeln!(text, "{message}");
        text
    }

    fn write_to(&self, file: u64) {
        let arguments = [file, self.0.as_ptr().addr() as u64, self.1 as u64, 0, 0, 0];
        // SAFETY: the text is there during the call.
        unsafe { raw_system_call(libc::SYS_write as u64, arguments) };
    }
}

impl fmt::Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let rest = &mut self.0[self.1..];
        let length = rest.len().min(text.len());
        rest[..length].copy_from_slice(&text.as_bytes()[..length]);
        self.1 += length;
        Ok(())
    }
}

/// Prints a message, without allocating.
pub(crate) fn say(message: fmt::Arguments<'_>) {
    Text::new(format_args!("vellum-aquila-ring0: {message}")).write_to(2);
}

/// Appends a line to a file, without allocating. No caller would hear of an error.
pub(crate) fn append(path: &CStr, line: fmt::Arguments<'_>) {
    let flags = libc::O_WRONLY | libc::O_APPEND | libc::O_CREAT | libc::O_CLOEXEC;
    let arguments = [path.as_ptr().addr() as u64, flags as u64, 0o666, 0, 0, 0];
    // SAFETY: the path ends with a zero.
    let file = unsafe { raw_system_call(libc::SYS_open as u64, arguments) };
    if file >= 0 {
        Text::new(line).write_to(file.cast_unsigned());
        // SAFETY: the descriptor was opened above.
        unsafe { raw_system_call(libc::SYS_close as u64, [file.cast_unsigned(), 0, 0, 0, 0, 0]) };
    }
}
