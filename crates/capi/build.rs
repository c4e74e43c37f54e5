//! Gives the shared library the name that programs look for it by: it changes with the interface.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libvellum.so.0");
}
