//! Headers of GGUF: good ones, each kind of bad one, and damaged bytes.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use vellum_tensors::Error;
use vellum_tensors::gguf::{Kind, MAX_TENSORS, Value, layout};

/// Puts a file together.
#[derive(Clone)]
struct File(Vec<u8>);

impl File {
    fn new(tensors: u64, pairs: u64) -> Self {
        Self(b"GGUF".to_vec()).u32(3).u64(tensors).u64(pairs)
    }

    fn u32(mut self, number: u32) -> Self {
        self.0.extend(number.to_le_bytes());
        self
    }

    fn u64(mut self, number: u64) -> Self {
        self.0.extend(number.to_le_bytes());
        self
    }

    fn text(self, text: &str) -> Self {
        let mut file = self.u64(text.len() as u64);
        file.0.extend(text.as_bytes());
        file
    }

    fn tensor(self, name: &str, shape: &[u64], kind: u32, offset: u64) -> Self {
        let file = self.text(name).u32(shape.len() as u32);
        shape.iter().fold(file, |file, length| file.u64(*length)).u32(kind).u64(offset)
    }

    /// With the data after the header.
    fn data(mut self, bytes: usize) -> Self {
        let start = self.0.len().next_multiple_of(32);
        self.0.resize(start + bytes, 0);
        self
    }

    fn refused(&self) -> String {
        layout(&self.0).unwrap_err().to_string()
    }
}

fn good() -> File {
    File::new(2, 3)
        .text("general.architecture")
        .u32(8)
        .text("llama")
        .text("general.alignment")
        .u32(4)
        .u32(32)
        .text("numbers")
        .u32(9)
        .u32(5)
        .u64(2)
        .u32(7)
        .u32(u32::MAX)
        .tensor("weights", &[64, 2], 8, 32)
        .tensor("bias", &[3], 0, 0)
        .data(32 + 2 * 2 * 34)
}

#[test]
fn metadata_and_tensors_are_found() {
    let file = good();
    let found = layout(&file.0).unwrap();
    let values: Vec<&Value> = found.metadata.iter().map(|(_, value)| value).collect();
    let numbers = Value::Array(vec![Value::I32(7), Value::I32(-1)]);
    assert_eq!(values, [&Value::Text(b"llama".to_vec()), &Value::U32(32), &numbers]);
    let data = file.0.len() as u64 - 32 - 136;
    let [weights, bias] = &found.tensors[..] else { panic!("{found:?}") };
    assert_eq!((weights.kind.name, &weights.shape[..]), ("Q8_0", &[2, 64][..]));
    assert_eq!(weights.bytes, data + 32..data + 32 + 136);
    assert_eq!((bias.name.as_str(), bias.bytes.clone()), ("bias", data..data + 12));
}

#[test]
fn cut_files_are_refused_wherever_they_are_cut() {
    let whole = good().0;
    for length in 0..whole.len() {
        assert!(layout(&whole[..length]).is_err(), "{length} bytes");
    }
}

#[test]
fn other_files_are_refused() {
    let version = |number: u32| File(b"GGUF".to_vec()).u32(number).u64(0).u64(0).refused();
    assert!(version(1).contains("version 1"));
    assert!(version(4).contains("version 4"));
    assert!(version(3_u32.swap_bytes()).contains("big-endian"));
    assert!(File(b"ggml1234".to_vec()).refused().contains("not a GGUF file"));
}

#[test]
fn numbers_that_no_honest_file_has_are_refused() {
    let limit = Error::Limit { what: "the number of tensors", found: u64::MAX, limit: MAX_TENSORS };
    assert_eq!(layout(&File::new(u64::MAX, 0).0), Err(limit));
    assert!(File::new(MAX_TENSORS, 0).refused().contains("ends within"));
    assert!(File::new(0, u64::MAX).refused().contains("at most"));
    let array = |kind, count| File::new(0, 1).text("a").u32(9).u32(kind).u64(count);
    assert!(array(0, u64::MAX).refused().contains("at most"));
    assert!(array(0, 1 << 22).refused().contains("ends within an array"));
    assert!(array(13, 1).data(32).refused().contains("does not exist"));
    let deep = (0..5).fold(File::new(0, 1).text("a").u32(9), |file, _| file.u32(9).u64(1));
    assert!(deep.data(64).refused().contains("nested too deep"));
    assert!(File::new(0, 1).u64(u64::MAX).refused().contains("ends within a key"));
    let long = "x".repeat(70_000);
    assert!(File::new(0, 1).text(&long).refused().contains("at most 65535"));
}

#[test]
fn metadata_that_cannot_be_is_refused() {
    let twice = File::new(0, 2).text("a").u32(4).u32(0).text("a").u32(4).u32(0);
    assert!(twice.refused().contains("twice"));
    let alignment =
        |kind, number| File::new(0, 1).text("general.alignment").u32(kind).u32(number).refused();
    assert!(alignment(4, 0).contains("power of two"));
    assert!(alignment(4, 24).contains("power of two"));
    assert!(alignment(5, 32).contains("power of two"));
    let truth = File::new(0, 1).text("a").u32(7).u32(2);
    assert!(truth.refused().contains("a truth value of 2"));
}

#[test]
fn tensors_that_cannot_be_are_refused() {
    let one = |shape: &[u64], kind, offset| {
        File::new(1, 0).tensor("a", shape, kind, offset).data(64).refused()
    };
    assert!(one(&[17], 0, 0).contains("after the file's end"));
    assert!(one(&[1], 0, 1 << 40).contains("after the file's end"));
    assert!(one(&[1], 0, u64::MAX - 31).contains("after the file's end"));
    assert!(one(&[u64::MAX, u64::MAX], 0, 0).contains("after the file's end"));
    assert!(one(&[1], 0, 8).contains("no multiple of 32"));
    assert!(one(&[33], 8, 0).contains("blocks of 32"));
    assert!(one(&[1], 4, 0).contains("type 4"));
    assert!(one(&[1; 5], 0, 0).contains("at most 4"));
    let two = |name, offset| {
        let file = File::new(2, 0).tensor("a", &[9], 0, 0).tensor(name, &[1], 0, offset);
        file.data(64).refused()
    };
    assert!(two("a", 32).contains("same name"));
    assert!(two("b", 32).contains("overlap those of 'a'"));
}

#[test]
fn types_have_numbers_of_their_own() {
    assert!(Kind::ALL.windows(2).all(|pair| pair[0].number < pair[1].number));
    assert_eq!(Kind::of(14).map(|kind| kind.name), Some("Q6_K"));
    assert_eq!(Kind::of(4), None);
}

proptest! {
    #[test]
    fn damaged_files_never_panic_nor_leave_the_file(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut file = good().0;
        for (index, byte) in damage {
            let at = index.index(file.len());
            file[at] = byte;
        }
        if let Ok(found) = layout(&file) {
            for tensor in found.tensors {
                prop_assert!(tensor.bytes.start <= tensor.bytes.end);
                prop_assert!(tensor.bytes.end <= file.len() as u64);
            }
        }
    }
}
