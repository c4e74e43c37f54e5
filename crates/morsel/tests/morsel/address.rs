//! Morsels at fixed addresses, and the places of the others.

use std::process::{Command, Stdio};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vellum_morsel::{Access, BackendKind, Error, Shape};
use vellum_testing::own_process;

use crate::common::{on_each, on_memfd};

/// Far from the addresses that programs use, and a multiple of 1 GiB.
const ADDRESS: u64 = 0x2345 << 30;

#[test]
fn a_bound_morsel_has_one_address_in_every_process() {
    if !own_process::entered("address::a_bound_morsel_has_one_address_in_every_process") {
        return;
    }
    on_each(|provider| {
        let shape = Shape::of_order(1).bound_to(ADDRESS);
        let morsel = provider.create(&shape).unwrap();
        let first = morsel.map(Access::ReadWrite).unwrap();
        assert_eq!(first.base().as_ptr().addr() as u64, ADDRESS);
        let busy = Error::AddressBusy { address: ADDRESS, extent: 2 << 20 };
        assert_eq!(morsel.map(Access::Read).unwrap_err(), busy);
        assert!(busy.to_string().contains("unmap"), "{busy}");
        drop(first);
        let received = morsel.read_only().unwrap();
        assert_eq!(received.shape().address(), Some(ADDRESS));
        let again = received.map(Access::Read).unwrap();
        assert_eq!(again.base().as_ptr().addr() as u64, ADDRESS);
        let other = morsel.map_at(Access::Read, ADDRESS + (2 << 20));
        assert!(matches!(other, Err(Error::Address { .. })), "{other:?}");
    });
}

#[test]
fn an_address_is_a_multiple_of_the_extent() {
    on_each(|provider| {
        let refused = provider.create(&Shape::of_order(2).bound_to(ADDRESS + (2 << 20)));
        assert!(matches!(refused, Err(Error::Address { .. })), "{refused:?}");
        let morsel = provider.create(&Shape::of_order(1)).unwrap();
        for address in [4096, ADDRESS + 4096, 1 << 47] {
            let refused = morsel.map_at(Access::Read, address);
            assert!(matches!(refused, Err(Error::Address { .. })), "{refused:?}");
        }
        let there = ADDRESS + (64 << 20);
        let mapping = morsel.map_at(Access::ReadWrite, there).unwrap();
        assert_eq!(mapping.base().as_ptr().addr() as u64, there);
    });
}

#[test]
fn a_full_address_space_is_an_error() {
    if !own_process::entered("address::a_full_address_space_is_an_error") {
        return;
    }
    let limit = Rlimit { current: Some(4 << 30), ..getrlimit(Resource::As) };
    setrlimit(Resource::As, limit).unwrap();
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(8 << 30)).unwrap();
        for access in [Access::Read, Access::ReadWrite] {
            let refused = morsel.map(access);
            assert!(matches!(refused, Err(Error::NoMemory { .. })), "{refused:?}");
        }
        provider.create(&Shape::of_length(4096)).unwrap().map(Access::Read).unwrap();
    });
}

#[test]
fn a_mapping_tells_its_extent() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(5_000)).unwrap();
        let mapping = morsel.map(Access::Read).unwrap();
        let expected = match provider.backend() {
            BackendKind::Kernel => 2 << 20,
            _ => 8192,
        };
        assert_eq!((mapping.length(), mapping.mapped()), (5_000, expected));
        assert!(mapping.base().as_ptr().addr().is_multiple_of(expected.min(4096)));
    });
}

#[test]
fn a_memfd_is_aligned_for_huge_pages_and_unmapped_completely() {
    if !own_process::entered("address::a_memfd_is_aligned_for_huge_pages_and_unmapped_completely") {
        return;
    }
    on_memfd(|provider| {
        let morsel = provider.create(&Shape::of_length((4 << 20) + 1).huge()).unwrap();
        let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        drop(morsel.map(Access::Read).unwrap());
        let before = mappings();
        for access in [Access::Read, Access::ReadWrite] {
            for _ in 0..10 {
                let mapping = morsel.map(access).unwrap();
                assert!(mapping.base().as_ptr().addr().is_multiple_of(2 << 20));
            }
        }
        assert_eq!(mappings(), before);
    });
}

#[test]
fn a_child_has_only_inherited_mappings() {
    on_each(|provider| {
        for inherit in [false, true] {
            let shape = Shape::of_length(4096);
            let morsel = provider.create(&if inherit { shape.inherit() } else { shape }).unwrap();
            let mapping = morsel.map(Access::Read).unwrap();
            // The flag "dc" stands for "is not copied by fork".
            let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let start = format!("{:x}-", mapping.base().as_ptr().addr());
            let flags = maps.lines().skip_while(|line| !line.starts_with(&start));
            let flags = flags.skip(1).find(|line| line.starts_with("VmFlags")).unwrap();
            assert_eq!(flags.split(' ').any(|flag| flag == "dc"), !inherit, "{flags}");
        }
    });
}

#[test]
fn a_started_program_does_not_get_the_descriptor() {
    on_each(|provider| {
        let morsel = provider.create(&Shape::of_length(4096)).unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&std::os::fd::AsFd::as_fd(&morsel));
        let path = format!("/proc/self/fd/{number}");
        let found = Command::new("test").args(["-e", &path]).stdin(Stdio::null()).status();
        assert!(!found.unwrap().success());
    });
}
