//! A fingerprint of bytes, to verify content without the file that it came from.

/// A hash of 64 bits. It is fast, and no defence against malice.
pub fn fingerprint(bytes: &[u8]) -> u64 {
    const MULTIPLIER: u64 = 0x9fb2_1c65_1e98_df25;
    let (words, rest) = bytes.as_chunks::<8>();
    let mut hash = (bytes.len() as u64).wrapping_mul(MULTIPLIER);
    let mut mix = |word: u64| hash = (hash ^ word).wrapping_mul(MULTIPLIER).rotate_left(29);
    for word in words {
        mix(u64::from_le_bytes(*word));
    }
    for byte in rest {
        mix(u64::from(*byte));
    }
    mix(0);
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flipped_bit_a_swap_and_a_length_are_noticed() {
        let bytes: Vec<u8> = (0..100_u8).collect();
        let original = fingerprint(&bytes);
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert_ne!(fingerprint(&other), original, "{at}");
            assert_ne!(fingerprint(&bytes[..at]), original, "{at}");
        }
        let mut swapped = bytes.clone();
        swapped.swap(3, 40);
        assert_ne!(fingerprint(&swapped), original);
        assert_ne!(fingerprint(&[0; 8]), fingerprint(&[0; 9]));
    }
}
