//! The types of tensors (`enum ggml_type` of ggml): elements come in blocks of a fixed number of
//! bytes.

/// A type of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kind {
    /// Its number in files.
    pub number: u32,
    /// Its name.
    pub name: &'static str,
    /// Elements of a block: 1 unless the type is quantised.
    pub block: u64,
    /// Bytes of a block.
    pub bytes: u64,
}

impl Kind {
    /// All known types.
    pub const ALL: &[Self] = &[
        Self::new(0, "F32", 1, 4),
        Self::new(1, "F16", 1, 2),
        Self::new(2, "Q4_0", 32, 18),
        Self::new(3, "Q4_1", 32, 20),
        Self::new(6, "Q5_0", 32, 22),
        Self::new(7, "Q5_1", 32, 24),
        Self::new(8, "Q8_0", 32, 34),
        Self::new(9, "Q8_1", 32, 40),
        Self::new(10, "Q2_K", 256, 84),
        Self::new(11, "Q3_K", 256, 110),
        Self::new(12, "Q4_K", 256, 144),
        Self::new(13, "Q5_K", 256, 176),
        Self::new(14, "Q6_K", 256, 210),
        Self::new(15, "Q8_K", 256, 292),
        Self::new(16, "IQ2_XXS", 256, 66),
        Self::new(17, "IQ2_XS", 256, 74),
        Self::new(18, "IQ3_XXS", 256, 98),
        Self::new(19, "IQ1_S", 256, 50),
        Self::new(20, "IQ4_NL", 32, 18),
        Self::new(21, "IQ3_S", 256, 110),
        Self::new(22, "IQ2_S", 256, 82),
        Self::new(23, "IQ4_XS", 256, 136),
        Self::new(24, "I8", 1, 1),
        Self::new(25, "I16", 1, 2),
        Self::new(26, "I32", 1, 4),
        Self::new(27, "I64", 1, 8),
        Self::new(28, "F64", 1, 8),
        Self::new(29, "IQ1_M", 256, 56),
        Self::new(30, "BF16", 1, 2),
        Self::new(34, "TQ1_0", 256, 54),
        Self::new(35, "TQ2_0", 256, 66),
        Self::new(39, "MXFP4", 32, 17),
        Self::new(40, "NVFP4", 64, 36),
        Self::new(41, "Q1_0", 128, 18),
    ];

    const fn new(number: u32, name: &'static str, block: u64, bytes: u64) -> Self {
        Self { number, name, block, bytes }
    }

    /// The type of a number.
    pub fn of(number: u32) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.number == number)
    }
}
