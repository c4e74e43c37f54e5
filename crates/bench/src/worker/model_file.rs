//! A file like those of language models: GGUF, with tensors of their size.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use super::whole_file::sum;

/// Tensors begin at multiples of a page. The header has this alignment.
const ALIGNMENT: usize = 4096;

/// Numbers in a row of a tensor, and its rows; each number has four bytes.
const DIMENSIONS: [u64; 2] = [4096, 2048];

/// Bytes of a tensor.
const TENSOR: usize = 4 * DIMENSIONS[0] as usize * DIMENSIONS[1] as usize;

/// The format's number for the type of unsigned 32-bit numbers.
const UNSIGNED: u32 = 4;

/// The format's number for tensors of 32-bit floating-point numbers.
const FRACTIONS: u32 = 0;

/// Creates a model whose tensors have `bytes` bytes. Returns the sum of the first words of all
/// pages.
///
/// # Errors
/// If it cannot be written, or the bytes are not those of whole tensors.
pub fn make(path: &Path, bytes: u64) -> Result<u64> {
    ensure!(bytes > 0 && bytes.is_multiple_of(TENSOR as u64), "whole tensors of {TENSOR} bytes");
    let mut file = File::create(path).with_context(|| format!("making {}", path.display()))?;
    let header = header(bytes / TENSOR as u64);
    let mut whole = sum(&header);
    file.write_all(&header)?;
    let mut tensor = vec![0; TENSOR];
    for number in 1..=bytes / TENSOR as u64 {
        for (page, at) in (0..TENSOR).step_by(ALIGNMENT).enumerate() {
            let word = (number << 32 | page as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            tensor[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        whole = whole.wrapping_add(sum(&tensor));
        file.write_all(&tensor)?;
    }
    file.sync_all()?;
    Ok(whole)
}

/// The header before the tensors.
fn header(tensors: u64) -> Vec<u8> {
    let mut header = b"GGUF".to_vec();
    let text = |header: &mut Vec<u8>, text: &str| {
        header.extend((text.len() as u64).to_le_bytes());
        header.extend(text.as_bytes());
    };
    header.extend(3_u32.to_le_bytes());
    header.extend(tensors.to_le_bytes());
    header.extend(1_u64.to_le_bytes());
    text(&mut header, "general.alignment");
    header.extend(UNSIGNED.to_le_bytes());
    header.extend((ALIGNMENT as u32).to_le_bytes());
    for number in 0..tensors {
        text(&mut header, &format!("blk.{number}.weight"));
        header.extend((DIMENSIONS.len() as u32).to_le_bytes());
        DIMENSIONS.iter().for_each(|dimension| header.extend(dimension.to_le_bytes()));
        header.extend(FRACTIONS.to_le_bytes());
        header.extend((number * TENSOR as u64).to_le_bytes());
    }
    header.resize(header.len().next_multiple_of(ALIGNMENT), 0);
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_of_the_format_find_the_tensors() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model");
        let expected = make(&path, 2 * TENSOR as u64).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(sum(&bytes), expected);
        let layout = vellum_tensors::gguf::layout(&bytes).unwrap();
        let names: Vec<&str> = layout.tensors.iter().map(|tensor| &tensor.name[..]).collect();
        assert_eq!(names, ["blk.0.weight", "blk.1.weight"]);
        assert!(make(&path, 5).is_err());
    }
}
