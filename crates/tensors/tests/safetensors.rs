//! Headers of safetensors: good ones, each kind of bad one, and arbitrary bytes.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use vellum_tensors::safetensors::{Kind, MAX_HEADER, layout};
use vellum_tensors::{Error, Tensor};

fn file(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + data, 0);
    file
}

fn refused(header: &str, data: usize) -> String {
    layout(&file(header, data)).unwrap_err().to_string()
}

const TWO: &str = concat!(
    r#"{"__metadata__":{"format":"pt"},"#,
    r#""b":{"dtype":"F16","shape":[2,3],"data_offsets":[4,16]},"#,
    r#""a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}   "#,
);

#[test]
fn tensors_are_found_in_the_order_of_their_bytes() {
    let found = layout(&file(TWO, 16)).unwrap();
    let start = TWO.len() as u64 + 8;
    let tensor = |name: &str, kind, shape: &[u64], from, to| Tensor {
        name: name.into(),
        kind,
        shape: shape.to_vec(),
        bytes: start + from..start + to,
    };
    let expected = [tensor("a", Kind::F32, &[], 0, 4), tensor("b", Kind::F16, &[2, 3], 4, 16)];
    assert_eq!(found.tensors, expected);
    assert_eq!(found.metadata["format"], "pt");
}

#[test]
fn a_file_without_tensors_and_tensors_without_bytes_are_good() {
    assert!(layout(&file("{}", 0)).unwrap().tensors.is_empty());
    let empty = r#"{"a":{"dtype":"I64","shape":[0,7],"data_offsets":[0,0]}}"#;
    assert_eq!(layout(&file(empty, 0)).unwrap().tensors[0].shape, [0, 7]);
}

#[test]
fn cut_files_are_refused_wherever_they_are_cut() {
    let whole = file(TWO, 16);
    for length in 0..whole.len() {
        assert!(layout(&whole[..length]).is_err(), "{length} bytes");
    }
    assert_eq!(layout(&whole[..7]), Err(Error::Truncated { what: "the length of the header" }));
    assert_eq!(layout(&whole[..20]), Err(Error::Truncated { what: "the header" }));
}

#[test]
fn huge_headers_are_refused() {
    let length = |length: u64| [&length.to_le_bytes()[..], b"{}"].concat();
    for found in [MAX_HEADER + 1, u64::MAX] {
        let error = layout(&length(found)).unwrap_err();
        let why = "as a header's length its first 8 bytes are";
        let text = format!("not a safetensors file: {why} {found}, and at most 100000000 is read");
        assert_eq!(error.to_string(), text);
    }
    assert_eq!(layout(&length(MAX_HEADER)), Err(Error::Truncated { what: "the header" }));
}

#[test]
fn headers_that_are_something_else_are_refused() {
    for header in ["", "[]", " {}", "PK", "\u{feff}{}"] {
        assert!(refused(header, 0).contains("not a safetensors file"), "{header:?}");
    }
    let deep = format!("{{\"a\":{}", "[".repeat(100_000));
    for header in ["{", "{\"a\":1}", "{}{}", "{\"__metadata__\":{\"a\":1}}", &deep] {
        assert!(refused(header, 0).contains("damaged"), "{header:.20}");
    }
}

#[test]
fn tensors_that_cannot_be_are_refused() {
    let one = |dtype: &str, shape: &str, from: u64, to: u64| {
        let entry = format!(r#""dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]"#);
        refused(&format!("{{\"a\":{{{entry}}}}}"), 8)
    };
    assert!(one("F32", "[2]", 0, 12).contains("not as many bytes"));
    assert!(one("F32", "[2]", 8, 0).contains("not as many bytes"));
    assert!(one("F32", "[3]", 0, 12).contains("after the data's end"));
    assert!(one("U8", "[8]", u64::MAX - 8, u64::MAX).contains("gap"));
    assert!(one("U8", "[7]", 1, 8).contains("gap"));
    assert!(one("U8", "[7]", 0, 7).contains("belong to no tensor"));
    assert!(one("U8", "[4294967296,4294967296,0]", 0, 0).contains("not as many bytes"));
    assert!(one("F4", "[16]", 0, 8).contains("unknown variant `F4`"));
    assert!(one("U8", "[-8]", 0, 8).contains("invalid value"));
    assert!(one("U8", &format!("{:?}", [1; 33]), 0, 1).contains("33 dimensions"));
    let two = |second: &str| {
        let entry = |range: &str| format!(r#"{{"dtype":"U8","shape":[4],"data_offsets":{range}}}"#);
        refused(&format!(r#"{{"a":{},{second}:{}}}"#, entry("[0,4]"), entry("[2,6]")), 6)
    };
    assert!(two("\"b\"").contains("overlap"));
    assert!(two("\"a\"").contains("two entries"));
}

proptest! {
    #[test]
    fn whatever_a_header_says_tensors_lie_within_the_file(
        entries in prop::collection::vec((0..3_u64, 0..5_u64, 0..12_u64, 0..12_u64), 0..4),
        data in 0..16_usize,
    ) {
        let mut texts = Vec::new();
        for (name, (kind, length, from, to)) in entries.iter().enumerate() {
            let kind = ["U8", "F16", "F32"][*kind as usize];
            let entry = format!(r#""dtype":"{kind}","shape":[{length}]"#);
            texts.push(format!(r#""{name}":{{{entry},"data_offsets":[{from},{to}]}}"#));
        }
        let file = file(&format!("{{{}}}", texts.join(",")), data);
        if let Ok(found) = layout(&file) {
            let mut next = (file.len() - data) as u64;
            for tensor in found.tensors {
                prop_assert_eq!(tensor.bytes.start, next);
                let bytes = tensor.shape.iter().product::<u64>() * tensor.kind.size();
                prop_assert_eq!(tensor.bytes.end - tensor.bytes.start, bytes);
                next = tensor.bytes.end;
            }
            prop_assert_eq!(next, file.len() as u64);
        }
    }

    #[test]
    fn damaged_files_never_panic(at in 0..300_usize, byte: u8) {
        let mut file = file(TWO, 16);
        let at = at % file.len();
        file[at] = byte;
        let _ = layout(&file);
    }
}
