//! Tests the lab's promises about a guest from inside. `make lab` runs this first. Outside of a
//! guest, the tests are skipped.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::process::Command;

/// Whether this is a guest of the lab.
fn inside() -> bool {
    let inside = Path::new("/modules/order").exists();
    if !inside {
        eprintln!("skipped: not in a guest of the lab");
    }
    inside
}

fn is_mounted(folder: &str, options: &str) -> bool {
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    mounts.lines().any(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        words[1] == folder && words[2] == "ext4" && words[3].contains(options)
    })
}

#[test]
fn a_guest_has_its_devices() {
    if inside() {
        for device in ["nvme0n1", "nullb0", "ram0", "loop0"] {
            assert!(Path::new("/dev").join(device).exists(), "{device}");
        }
        let scratch = fs::read_to_string("/scratch").unwrap();
        assert!(is_mounted(&scratch, ""), "{scratch}");
    }
}

#[test]
fn user_space_has_a_controller_behind_the_iommu() {
    if inside() {
        let device = Path::new("/sys/bus/pci/drivers/vfio-pci/0000:00:10.0");
        assert_eq!(fs::read_to_string(device.join("class")).unwrap().trim(), "0x010802", "NVMe");
        let group = fs::read_link(device.join("iommu_group")).unwrap();
        let number = group.file_name().unwrap();
        assert!(Path::new("/dev/vfio").join(number).exists(), "{group:?}");
    }
}

#[test]
fn every_module_in_the_list_is_loaded() {
    if inside() {
        let loaded = fs::read_to_string("/proc/modules").unwrap();
        let order = fs::read_to_string("/modules/order").unwrap();
        let own = fs::read_to_string("/modules/own").unwrap_or_default();
        for module in order.lines().chain(own.lines()) {
            let found = loaded.lines().any(|line| line.split(' ').next() == Some(module));
            assert!(found, "{module}");
        }
    }
}

#[test]
fn persistent_memory_is_mapped_without_a_page_cache_and_kept() {
    if !inside() || !Path::new("/pmem").exists() {
        eprintln!("skipped: no persistent memory");
        return;
    }
    assert!(is_mounted("/pmem", "dax"), "{}", fs::read_to_string("/proc/mounts").unwrap());
    let starts = Path::new("/pmem/starts");
    let before: u32 = fs::read_to_string(starts).map_or(0, |text| text.parse().unwrap());
    fs::write(starts, (before + 1).to_string()).unwrap();
    assert!(Command::new("sync").status().unwrap().success());
    println!("persistent memory has seen {} starts", before + 1);
}
