//! `libvellum`: stores and Morsels for C. What the functions do is said in `include/vellum.h` and
//! `include/vellum_morsel.h`.
//!
//! What holds: handles are references or boxes, which C sees as pointers, so that NULL is `None`
//! and the rest is the caller's contract, as the header states it; raw pointers are taken in `raw`
//! alone. Every function goes through `call`, from which no panic gets out.

mod call;
mod create;
mod daemon;
mod mapping;
mod morsel;
mod raw;
mod share;
mod store;
mod types;
