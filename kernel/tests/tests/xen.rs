//! Xen: in a PV domain the hypervisor writes page tables, so the module must not load. The lab
//! starts such a machine for this test alone, without the module.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::process::Command;

use vellum_kernel_tests::DEVICE;
use vellum_kernel_tests::kernel_log::KernelLog;

/// The module, as the lab has built it.
const MODULE: &str = "/modules/vellum.ko";

#[test]
#[ignore = "needs a machine with Xen"]
fn a_pv_domain_is_refused() {
    if !Path::new(MODULE).exists() {
        eprintln!("skipped: no {MODULE}");
        return;
    }
    assert_eq!(fs::read_to_string("/sys/hypervisor/guest_type").unwrap().trim(), "PV");
    KernelLog::begin().wait_for("Xen PV domains are not supported", || {
        let status = Command::new("insmod").arg(MODULE).status().unwrap();
        // It ends with the number of the error.
        assert_eq!(status.code(), Some(libc::ENODEV));
    });
    assert!(!Path::new(DEVICE).exists());
    assert!(!fs::read_to_string("/proc/filesystems").unwrap().contains("morselfs"));
    assert!(!fs::read_to_string("/proc/modules").unwrap().contains("vellum"));
}
