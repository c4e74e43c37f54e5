//! A tensor's place: how many bytes its shape needs, and whether places overlap.

use std::ops::Range;

use crate::error::{Error, Result};

/// Dimensions that a tensor may have: as many as every version of NumPy takes.
pub const MAX_RANK: usize = 32;

/// A tensor: its type is one of the format's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor<T> {
    /// Its name, unique in the file.
    pub name: String,
    /// The type of its elements.
    pub kind: T,
    /// Its dimensions; elements of the last one are neighbours.
    pub shape: Vec<u64>,
    /// Its bytes, counted from the beginning of the file.
    pub bytes: Range<u64>,
}

/// Elements of a shape; `None` if the product overflows.
pub(crate) fn elements(shape: &[u64]) -> Option<u64> {
    // Multiplies the others first, because a dimension of 0 must not hide an absurd one.
    shape.iter().try_fold(1_u64, |product, &length| product.max(1).checked_mul(length.max(1)))?;
    Some(shape.iter().product())
}

/// Checks that no tensors overlap; otherwise the error names one that overlaps another.
pub(crate) fn apart<T>(tensors: &[Tensor<T>]) -> Result<()> {
    let mut sorted: Vec<&Tensor<T>> =
        tensors.iter().filter(|tensor| !tensor.bytes.is_empty()).collect();
    sorted.sort_unstable_by_key(|tensor| tensor.bytes.start);
    for pair in sorted.windows(2) {
        if pair[0].bytes.end > pair[1].bytes.start {
            let reason = format!("its bytes overlap those of '{}'", pair[0].name);
            return Err(Error::Tensor { name: pair[1].name.clone(), reason });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_counted_without_overflow() {
        assert_eq!(elements(&[]), Some(1));
        assert_eq!(elements(&[3, 0, 5]), Some(0));
        assert_eq!(elements(&[1 << 32, 1 << 31]), Some(1 << 63));
        assert_eq!(elements(&[1 << 32, 1 << 32]), None);
        assert_eq!(elements(&[0, u64::MAX, u64::MAX]), None);
    }
}
