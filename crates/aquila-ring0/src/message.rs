//! What is said where nothing may be allocated.
#![allow(unsafe_code)]

use std::fmt::{self, Write as _};

use crate::sys::raw_system_call;

/// Ends the process, because the guest cannot go on, and nothing says what the program would see.
pub(crate) fn stop(reason: fmt::Arguments<'_>) -> ! {
    say(format_args!("a thread cannot go on in ring 0: {reason}"));
    // SAFETY: it ends the process.
    unsafe { libc::abort() }
}

/// Prints a message, without allocating.
pub(crate) fn say(message: fmt::Arguments<'_>) {
    struct Text([u8; 256], usize);
    impl fmt::Write for Text {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            let rest = &mut self.0[self.1..];
            let length = rest.len().min(text.len());
            rest[..length].copy_from_slice(&text.as_bytes()[..length]);
            self.1 += length;
            Ok(())
        }
    }
    let mut text = Text([0; 256], 0);
    let _ = writeln!(text, "vellum-aquila-ring0: {message}");
    let arguments = [2, text.0.as_ptr().addr() as u64, text.1 as u64, 0, 0, 0];
    // SAFETY: the text is there during the call.
    unsafe { raw_system_call(libc::SYS_write as u64, arguments) };
}
