//! What the bodies of the fuzz targets share.

/// Bytes for choices; zeros when they are used up.
pub struct Source<'a>(pub &'a [u8]);

impl<'a> Source<'a> {
    /// The next bytes; fewer at the end.
    pub fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// A number of 16 bits.
    pub fn number(&mut self) -> usize {
        self.take(2).iter().fold(0, |number, byte| number << 8 | usize::from(*byte))
    }

    /// A number below `limit`, or 0.
    pub fn below(&mut self, limit: usize) -> usize {
        self.number() % limit.max(1)
    }

    /// Whether there are more bytes.
    pub fn has_more(&self) -> bool {
        !self.0.is_empty()
    }
}

/// Changes some bytes: one of them, or a number of up to 64 bits, or the length. Half of the
/// changes hit the first bytes.
pub fn change_bytes(bytes: &mut Vec<u8>, source: &mut Source<'_>) {
    let choice = source.number();
    let limit = if choice & 0x10 == 0 { bytes.len().min(80) } else { bytes.len() };
    let at = source.below(limit);
    let operand = source.number();
    match choice % 8 {
        0 => bytes.truncate(at),
        1 => {
            let at = at.min(bytes.len());
            bytes.splice(at..at, std::iter::repeat_n(operand as u8, operand >> 8));
        }
        2 | 3 => {
            // Numbers at the edges of what fits.
            let number = (1_u64 << (operand % 64)).wrapping_sub((operand >> 8) as u64 % 3);
            let len = [1, 2, 4, 8][choice >> 5 & 3];
            for (byte, new) in bytes.iter_mut().skip(at).zip(&number.to_le_bytes()[..len]) {
                *byte = *new;
            }
        }
        _ => {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = operand as u8;
            }
        }
    }
}
