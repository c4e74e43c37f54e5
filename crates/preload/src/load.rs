//! What the library does when it is loaded, before the program has threads, holes in its memory, or
//! functions that run at `fork`.
#![allow(unsafe_code)]

use vellum_interpose::Rules;

use crate::{anchor, cached, substitute, system};

/// The C library calls it before the program's own code.
#[used]
// SAFETY: the section has pointers to functions that the C library calls without arguments that
// this one needs.
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

/// Does nothing unless the environment asks for mounts, because most programs that inherit the
/// library have none.
extern "C" fn at_load() {
    if [Rules::OF_CACHES, Rules::OF_MORSELS].iter().flatten().any(|name| system::has_variable(name))
    {
        anchor::reserve_places();
        substitute::read_rules();
        // SAFETY: the function is there as long as the process: a library that is preloaded is
        // never unloaded.
        unsafe { libc::pthread_atfork(None, None, Some(cached::in_child)) };
    }
}
