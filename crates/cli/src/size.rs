//! Parses and formats sizes in bytes.

/// Names of the powers of 1024.
const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];

/// Reads `4096`, `512KiB`, `1.5GiB` or, short for the same, `512K`.
///
/// # Errors
/// Says what a size looks like.
pub fn parse(text: &str) -> Result<u64, String> {
    let split = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.');
    let (number, unit) = text.split_at(split.unwrap_or(text.len()));
    let complaint = || format!("'{text}' is not a size; write bytes, or 512KiB, 64MiB, 1.5GiB");
    let power = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 1,
        "m" | "mib" => 2,
        "g" | "gib" => 3,
        "t" | "tib" => 4,
        _ => return Err(complaint()),
    };
    let scale = 1_u64 << (10 * power);
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale).ok_or_else(|| format!("'{text}' is too large"));
    }
    let fraction = number.parse::<f64>().map_err(|_| complaint())?;
    let bytes = fraction * scale as f64;
    if power == 0 || !bytes.is_finite() || bytes >= u64::MAX as f64 {
        return Err(complaint());
    }
    Ok(bytes as u64)
}

/// Shows bytes in the largest unit that keeps the number at one or more.
pub fn show(bytes: u64) -> String {
    let power = (bytes.max(1).ilog2() / 10).min(UNITS.len() as u32 - 1);
    let unit = UNITS[power as usize];
    if power == 0 {
        return format!("{bytes} {unit}");
    }
    format!("{:.1} {unit}", bytes as f64 / (1_u64 << (10 * power)) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        let good = [
            ("0", 0),
            ("4096", 4096),
            ("1KiB", 1024),
            ("3k", 3072),
            ("1.5GiB", 3 << 29),
            ("2 MiB", 2 << 20),
            ("1TiB", 1 << 40),
        ];
        for (text, bytes) in good {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        let bad = ["", "KiB", "-1", "1.5", "1KB", "1..5M", "ten", "99999999TiB", "1e9"];
        for text in bad {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown() {
        assert_eq!(show(0), "0 B");
        assert_eq!(show(1023), "1023 B");
        assert_eq!(show(1536), "1.5 KiB");
        assert_eq!(show(2 << 30), "2.0 GiB");
        assert_eq!(show(5 << 50), "5120.0 TiB");
    }
}
