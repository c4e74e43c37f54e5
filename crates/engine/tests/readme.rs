//! The example in README.md: it compiles, it runs, and it is the same as in the file.

use vellum::{Options, Store};

/// The example in README.md, in another folder.
fn example() -> Result<(), Box<dyn std::error::Error>> {
    let store = Store::open_or_create("capitals.vellum", &Options::new().pool_bytes(64 << 20))?;
    let capitals = store.tree_or_create("capitals")?;
    capitals.upsert(b"France", b"Paris")?;
    for entry in capitals.range("A".."G") {
        let (country, capital) = entry?;
        println!("{}: {}", country.escape_ascii(), capital.escape_ascii());
    }
    store.close()?;
    Ok(())
}

#[test]
fn the_example_of_the_first_page_runs() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    // The other test of this file needs no folder.
    std::env::set_current_dir(&folder)?;
    example()?;
    let store = Store::open("capitals.vellum", &Options::new().pool_bytes(64 << 20))?;
    assert_eq!(&*store.tree("capitals")?.get(b"France")?.ok_or("no France")?, b"Paris");
    std::env::set_current_dir("/")?;
    Ok(())
}

#[test]
fn the_example_is_the_one_of_the_first_page() {
    let readme = include_str!("../../../README.md");
    let block = readme.split("```").nth(1).expect("a block of code");
    let lines: Vec<&str> = block.lines().skip(1).map(str::trim).collect();
    assert!(lines.len() > 8, "{lines:?}");
    let here = include_str!("readme.rs");
    for line in lines.into_iter().filter(|line| !line.is_empty()) {
        assert!(here.lines().any(|it| it.trim() == line), "{line}");
    }
}
