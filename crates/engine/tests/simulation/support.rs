//! Seeds, and keys and values that are difficult for a tree.

use vellum::Options;
pub use vellum_testing::random::Random;

/// Prints the seed if the test fails.
struct Named(u64);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with VELLUM_SEED={}", self.0);
        }
    }
}

/// Runs a simulation for each seed: the seed of `VELLUM_SEED`, or as many seeds as `VELLUM_SEEDS`
/// says.
pub fn each_seed(count: u64, run: impl Fn(u64)) {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let seeds = match number("VELLUM_SEED") {
        Some(seed) => seed..=seed,
        None => 1..=number("VELLUM_SEEDS").unwrap_or(count),
    };
    for seed in seeds {
        let _named = Named(seed);
        run(seed);
    }
}

/// Options for a pool of `pool_pages` tree pages without background threads.
pub fn options(pool_pages: u64, page_frames: u32) -> Options {
    let bytes = pool_pages * u64::from(page_frames) * 4096;
    Options::new().pool_bytes(bytes).page_frames(page_frames).evictors(0)
}

/// Keys of one shape, by number.
#[derive(Clone, Copy, Debug)]
pub struct Keys {
    shape: u64,
    count: u64,
    max: usize,
}

impl Keys {
    pub fn new(random: &mut Random, max: usize) -> Keys {
        let count = [12, 60, 300, 1500][random.index(4)];
        Keys { shape: random.below(8), count, max }
    }

    pub fn any(&self, random: &mut Random) -> Vec<u8> {
        self.key(random.below(self.count))
    }

    pub fn key(&self, number: u64) -> Vec<u8> {
        let (shape, n) = match self.shape {
            7 => (number % 7, number / 7),
            shape => (shape, number),
        };
        let max = self.max;
        match shape {
            0 => (n as u16).to_be_bytes().to_vec(),
            // Repetitions of one byte: each key is a prefix of the next. The empty key is one of
            // them.
            1 => {
                let len = n as usize / 4 * 7 % (max + 1);
                vec![[0, 255, b'a', 1][n as usize % 4]; len]
            }
            // The longest keys, which differ only in the last bytes.
            2 => [&vec![b'x'; max - 2][..], &(n as u16).to_be_bytes()].concat(),
            // The longest keys, which differ in the first bytes.
            3 => [&(n as u16).to_be_bytes()[..], &vec![255; max - 2]].concat(),
            // Only bytes 0 and 255, of any length.
            4 => {
                let bits = 64 - (n + 1).leading_zeros() - 1;
                (0..bits).map(|bit| if n >> bit & 1 == 0 { 0 } else { 255 }).chain([0]).collect()
            }
            // Groups of keys, each with a long prefix of its own.
            5 => {
                let group = (n % 5) as u8;
                let prefix = vec![group; max / 8 * usize::from(group)];
                [&prefix[..], &(n / 5).to_be_bytes()].concat()
            }
            _ => format!("key {n}").into_bytes(),
        }
    }
}

/// Values of all lengths, each different from all others.
#[derive(Clone, Debug)]
pub struct Values {
    made: u64,
    pub max: u64,
    pub max_inline: usize,
    /// One in so many values is a blob.
    pub blobs: u64,
}

impl Values {
    pub fn next(&mut self, random: &mut Random) -> Vec<u8> {
        let around = |len: u64, random: &mut Random| (len + random.below(5)).saturating_sub(2);
        let len = match random.below(self.blobs) {
            0 => match random.below(8) {
                0 => self.max,
                1..=3 => around(4096 * (1 + random.below(4)) - 48, random),
                _ => self.max_inline as u64 + random.below(6000),
            },
            // Around the greatest length of an inline value.
            1 => around(self.max_inline as u64 - random.below(40), random),
            2 => random.below(400),
            _ => random.below(40),
        };
        self.of(len.min(self.max) as usize)
    }

    /// A value for a stream: of any length, up to several times the pool.
    pub fn streamed(&mut self, random: &mut Random) -> Vec<u8> {
        let len = match random.below(4) {
            0 => return self.next(random),
            1 => 4040 * (1 + random.below(12)) + random.below(3) - 1,
            2 => random.below(70_000),
            _ => random.below(4 * self.max.min(20_000)),
        };
        self.of(len as usize)
    }

    /// A value of this length. It differs from all others if its length allows that.
    pub fn of(&mut self, len: usize) -> Vec<u8> {
        self.made += 1;
        let mut bytes = Random(self.made);
        let mut value = self.made.to_le_bytes().to_vec();
        while value.len() < len {
            value.extend(bytes.next().to_le_bytes());
        }
        value.truncate(len);
        value
    }

    pub fn new(store: &vellum::Store, blobs: u64) -> Values {
        let limits = store.limits();
        Values { made: 0, max: limits.max_value, max_inline: limits.max_inline_entry - 12, blobs }
    }
}
