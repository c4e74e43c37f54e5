//! The Rust view and the headers agree. A C program made from the headers prints every constant,
//! size and offset. Its output must agree with this crate, and this crate must have everything that
//! the headers define.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Command;

use vellum_uapi::{dax, exmap, exmap_published, morsel};

/// The values of the Rust view, by the expression that gives the same in C.
type View = BTreeMap<String, u64>;

fn constants(view: &mut View, prefix: &str, all: &[(&str, u64)]) {
    view.extend(all.iter().map(|(name, value)| (format!("{prefix}{name}"), *value)));
}

/// Size of a structure and where its fields are.
macro_rules! structure {
    ($view:ident, $name:literal, $type:ty, $($field:ident)+) => {
        $view.insert(format!("sizeof(struct {})", $name), size_of::<$type>() as u64);
        $(
            let field = stringify!($field);
            $view.insert(
                format!("offsetof(struct {}, {field})", $name),
                offset_of!($type, $field) as u64,
            );
        )+
    };
}

macro_rules! named {
    ($module:path; $($name:ident)+) => {{
        use $module as module;
        [$((stringify!($name), u64::from(module::$name))),+]
    }};
}

fn view_of_exmap() -> View {
    let mut view = View::new();
    constants(
        &mut view,
        "VELLUM_EXMAP_",
        &named!(vellum_uapi::exmap;
            OFFSET_SURFACE OFFSET_TABLES MAX_INTERFACES VECTOR_ENTRIES ENTRY_PAGES
            CAN_READ CAN_WRITE CAN_SHOW_TABLES
            PINNABLE READS_ZEROS STEALING TRACKS SHRINKS HUGE NO_POOL FLUSH_EACH LOCK_TABLES
            CLEAR_ACCESSED CLEAR_WRITTEN
            IOC QUERY CREATE STAT CLONE HARVEST MOVE RESIZE ALLOC FREE READ WRITE
            OP_REFRESH),
    );
    structure!(view, "vellum_exmap_query", exmap::Query,
        size version features flags max_interfaces vector_entries);
    structure!(view, "vellum_exmap_create", exmap::Create,
        size interfaces flags frames backing blocks);
    structure!(view, "vellum_exmap_harvest", exmap::Harvest,
        size flags page count accessed written);
    structure!(view, "vellum_exmap_move", exmap::Move, size interface from to count);
    structure!(view, "vellum_exmap_stat", exmap::Stat,
        size interfaces frames resident surface tables allocated freed conflicts busy read written
        flushes refills attached detached blocks blocks_free huge splits);
    view
}

fn view_of_dax() -> View {
    let mut view = View::new();
    constants(
        &mut view,
        "VELLUM_DAX_",
        &named!(vellum_uapi::dax;
            UNIT READ_UNIT MAX_EXTENT DURABLE NOSYNC HAS_HEAPS KEEPS_TABLES READS_STORED
            HEAP_WRITES MAX_BATCH STORED_MAGIC STORED_VERSION STORED_PRIME STORED_RUNS
            QUERY OPEN REFRESH STAT HEAP ATTACH DETACH REAP HEAP_STAT TABLES),
    );
    structure!(view, "vellum_dax_query", dax::Query, size version features flags);
    structure!(view, "vellum_dax_open", dax::Open, size file flags);
    structure!(view, "vellum_dax_stat", dax::Stat,
        size order flags pages leaves tables mounts barred stale attachments stored);
    structure!(view, "vellum_dax_heap", dax::Heap, size batch flags);
    structure!(view, "vellum_dax_attach", dax::Attach, size file offset length address);
    structure!(view, "vellum_dax_heap_stat", dax::HeapStat,
        size batch regions taken attached served zombies attaches detaches flushes
        served_faults);
    structure!(view, "vellum_dax_tables", dax::Tables,
        size reserved tables kept kept_bytes kept_most resumed evicted reclaimed stored_used
        stored_refused);
    structure!(view, "vellum_dax_stored", dax::Stored,
        magic version runs inode generation reserved length uuid_first uuid_last checksum);
    structure!(view, "vellum_dax_run", dax::Run, block page pages);
    view
}

fn view_of_morsel() -> View {
    let mut view = View::new();
    constants(
        &mut view,
        "VELLUM_MORSEL_",
        &named!(vellum_uapi::morsel;
            MAGIC MAX_ORDER PINNABLE HUGE INHERIT SEAL_CONTENT SEAL_POPULATION
            QUERY CREATE FILL STAT SEAL REVOKE),
    );
    structure!(view, "vellum_morsel_query", morsel::Query,
        size version features flags max_order reserved);
    structure!(view, "vellum_morsel_create", morsel::Create, size order length flags address);
    structure!(view, "vellum_morsel_fill", morsel::Fill, size source from offset length filled);
    structure!(view, "vellum_morsel_stat", morsel::Stat,
        size order length flags address pages huge tables mounts seals);
    view
}

fn view_of_published() -> View {
    let mut view = View::new();
    constants(
        &mut view,
        "EXMAP_PUBLISHED_",
        &named!(vellum_uapi::exmap_published;
            OP_READ OP_ALLOC OP_FREE OP_WRITE SETUP ACTION CLONE STATS),
    );
    structure!(view, "exmap_published_setup", exmap_published::Setup,
        fd max_interfaces buffer_size flags);
    structure!(view, "exmap_published_action", exmap_published::Action,
        interface iov_len opcode padding flags);
    structure!(view, "exmap_published_stats", exmap_published::Stats,
        flags buffer_size alloc_count max_interfaces padding);
    view
}

fn headers() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernel/include/uapi")
}

/// The values of C expressions, as unsigned 64-bit numbers.
fn evaluate(header: &str, expressions: &BTreeSet<String>) -> View {
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("print.c"), folder.path().join("print"));
    let mut text = format!("#include <vellum/{header}>\n#include <stddef.h>\n#include <stdio.h>\n");
    text.push_str("int main(void)\n{\n");
    for expression in expressions {
        text.push_str(&format!(
            "printf(\"%llu {expression}\\n\", (unsigned long long)({expression}));\n"
        ));
    }
    text.push_str("return 0;\n}\n");
    fs::write(&source, text).unwrap();
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let mut command = Command::new(compiler);
    command.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"]).arg(headers());
    assert!(command.arg("-o").arg(&program).arg(&source).status().unwrap().success());
    let output = String::from_utf8(Command::new(&program).output().unwrap().stdout).unwrap();
    let values = output.lines().map(|line| line.split_once(' ').unwrap());
    values.map(|(value, name)| (name.to_owned(), value.parse().unwrap())).collect()
}

/// A header without its comments.
fn code_of(header: &str) -> String {
    let text = fs::read_to_string(headers().join("vellum").join(header)).unwrap();
    let mut parts = text.split("/*");
    let mut code = parts.next().unwrap().to_owned();
    parts.for_each(|part| code.push_str(part.split_once("*/").unwrap().1));
    code
}

/// The definitions of a header: its macros without parameters, its structures and their fields.
fn defined(header: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut structure = None;
    for line in code_of(header).lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["#define", name, _, ..] if !name.contains('(') => {
                found.insert(name.to_owned());
            }
            ["struct", name, "{"] => {
                found.insert(format!("sizeof(struct {name})"));
                structure = Some(name.to_owned());
            }
            ["};"] => structure = None,
            [_, ..] if structure.is_some() => {
                let fields = line.trim().trim_end_matches(';').split_once(' ').unwrap().1;
                let name = structure.as_deref().unwrap_or_default();
                let field = |field: &str| format!("offsetof(struct {name}, {})", field.trim());
                found.extend(fields.split(',').map(field));
            }
            _ => {}
        }
    }
    found
}

fn assert_same(header: &str, view: &View) {
    let known: BTreeSet<String> = view.keys().cloned().collect();
    let defined = defined(header);
    assert!(defined.len() > 10, "{defined:?}");
    let missing: Vec<&String> = defined.difference(&known).collect();
    assert!(missing.is_empty(), "{header} has what the Rust view has not: {missing:?}");
    let values = evaluate(header, &known);
    for (name, value) in view {
        assert_eq!(values[name], *value, "{name}: {:#x} in C, {value:#x} here", values[name]);
    }
}

#[test]
fn the_exmap_header_is_as_the_rust_view() {
    assert_same("exmap.h", &view_of_exmap());
}

#[test]
fn the_published_header_is_as_the_rust_view() {
    assert_same("exmap_published.h", &view_of_published());
}

#[test]
fn the_morsel_header_is_as_the_rust_view() {
    assert_same("morsel.h", &view_of_morsel());
}

#[test]
fn the_dax_header_is_as_the_rust_view() {
    assert_same("dax.h", &view_of_dax());
}

#[test]
fn extents_are_alike() {
    let expression = |order| format!("VELLUM_MORSEL_EXTENT({order})");
    let view: View = (0..=4).map(|order| (expression(order), morsel::extent(order))).collect();
    assert_eq!(evaluate("morsel.h", &view.keys().cloned().collect()), view);
    let lengths = [0, 1, 1 << 30, (1 << 30) + 1, (5 << 30) - 1];
    let expression = |length| format!("VELLUM_DAX_EXTENT({length}ULL)");
    let view: View = lengths.map(|length| (expression(length), dax::extent(length))).into();
    assert_eq!(evaluate("dax.h", &view.keys().cloned().collect()), view);
}

/// A macro with parameters in C is a function here.
#[test]
fn entries_vectors_and_offsets_are_packed_alike() {
    let mut view = View::new();
    for (page, count) in [(0, 0), (5, 1), ((1 << 52) - 1, 4095), (1 << 52, 4096), (0xabc, 513)] {
        let expression = format!("VELLUM_EXMAP_ENTRY({page}ULL, {count}ULL)");
        view.insert(expression, exmap::Entry::new(page, count).bits());
    }
    for bits in [0, 0xffff_ffff, 0x1_ffff_fff4, 0xabcd_0fff_8000_0000, u64::MAX] {
        let entry = exmap::Entry::from_bits(bits);
        let result = i64::from(entry.result()).cast_unsigned();
        view.insert(format!("VELLUM_EXMAP_RESULT({bits}ULL)"), result);
        view.insert(format!("VELLUM_EXMAP_PAGES({bits}ULL)"), entry.pages().into());
    }
    for number in [0, 1, 255, 256] {
        let expression = format!("VELLUM_EXMAP_OFFSET_INTERFACE({number})");
        view.insert(expression, exmap::offset_interface(number));
        let expression = format!("VELLUM_EXMAP_VECTOR({number}, 512)");
        view.insert(expression, exmap::vector(number, 512));
    }
    let values = evaluate("exmap.h", &view.keys().cloned().collect());
    assert_eq!(values, view);
}

#[test]
fn what_goes_into_an_entry_comes_out() {
    let entry = exmap::Entry::new(0x0000_1234_5678, 77);
    assert_eq!((entry.page(), entry.count()), (0x1234_5678, 77));
    let answer = exmap::Entry::from_bits((3 << 32) | 0xffff_fff4);
    assert_eq!((answer.result(), answer.pages()), (-12, 3));
    assert_eq!(format!("{:?}", exmap::Entry::new(1, 2)), "Entry(in: 1+2, out: 1 for 0)");
}
