//! A device that user space drives (VFIO), and the memory that it may reach.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rustix::io::Errno;
use vfio_bindings::bindings::vfio;

use crate::sys;

/// The driver of devices for user space.
const DRIVER: &str = "/sys/bus/pci/drivers/vfio-pci";

/// The rights of a device to registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Load.
    Read = vfio::VFIO_DMA_MAP_FLAG_READ as isize,
    /// Load and store.
    ReadWrite = (vfio::VFIO_DMA_MAP_FLAG_READ | vfio::VFIO_DMA_MAP_FLAG_WRITE) as isize,
}

/// A device with its own address space in the IOMMU.
#[derive(Debug)]
pub struct Device {
    address: String,
    // The order in which they are closed.
    device: File,
    _group: OwnedFd,
    container: OwnedFd,
    registers: u64,
    configuration: u64,
}

impl Device {
    /// The device that this machine has for user space. `None`, and a printed line, if there is
    /// none.
    pub fn open() -> Option<Self> {
        let address = address();
        if address.is_none() {
            eprintln!("skipped: no device for user space at {DRIVER}");
        }
        Some(Self::at(address?))
    }

    fn at(address: String) -> Self {
        let container = open("/dev/vfio/vfio");
        let group = open(&format!("/dev/vfio/{}", group_of(&address)));
        let number = container.as_raw_fd();
        // The call reads the descriptor's number.
        let number = (&raw const number).expose_provenance() as u64;
        call(&group, SET_CONTAINER, number).expect("VFIO_GROUP_SET_CONTAINER");
        call(&container, SET_IOMMU, vfio::VFIO_TYPE1v2_IOMMU.into()).expect("VFIO_SET_IOMMU");
        let device = device_of(&group, &address);
        let registers = region(&device, vfio::VFIO_PCI_BAR0_REGION_INDEX);
        let configuration = region(&device, vfio::VFIO_PCI_CONFIG_REGION_INDEX);
        let opened = Self { address, device, _group: group, container, registers, configuration };
        opened.let_it_reach_memory();
        opened
    }

    /// Its address on the bus, as the kernel's messages have it: `00:10.0`.
    pub fn address(&self) -> &str {
        self.address.split_once(':').map_or("", |(_, rest)| rest)
    }

    /// Maps addresses of this process at addresses of the device, and pins all their pages.
    pub fn register(
        &self,
        address: usize,
        length: usize,
        seen_at: u64,
        access: Access,
    ) -> Result<(), Errno> {
        let request = vfio::vfio_iommu_type1_dma_map {
            argsz: size_of::<vfio::vfio_iommu_type1_dma_map>() as u32,
            flags: access as u32,
            vaddr: address as u64,
            iova: seen_at,
            size: length as u64,
        };
        let request = (&raw const request).expose_provenance() as u64;
        call(&self.container, MAP_DMA, request).map(drop)
    }

    /// Removes the device's access to registered memory. Returns the number of bytes.
    pub fn unregister(&self, seen_at: u64, length: usize) -> Result<u64, Errno> {
        let mut request = vfio::vfio_iommu_type1_dma_unmap {
            argsz: size_of::<vfio::vfio_iommu_type1_dma_unmap>() as u32,
            iova: seen_at,
            size: length as u64,
            ..Default::default()
        };
        call(&self.container, UNMAP_DMA, (&raw mut request).expose_provenance() as u64)?;
        Ok(request.size)
    }

    /// A register.
    pub fn load(&self, register: u64) -> u32 {
        let mut bytes = [0; 4];
        self.device.read_exact_at(&mut bytes, self.registers + register).expect("a register");
        u32::from_le_bytes(bytes)
    }

    /// Sets a register.
    pub fn store(&self, register: u64, value: u32) {
        let at = self.registers + register;
        self.device.write_all_at(&value.to_le_bytes(), at).expect("a register");
    }

    /// Enables its registers and bus mastering, which the kernel disables when it opens a device.
    fn let_it_reach_memory(&self) {
        const COMMAND: u64 = 4;
        const MEMORY: u16 = 1 << 1;
        const MASTER: u16 = 1 << 2;
        let at = self.configuration + COMMAND;
        self.device.write_all_at(&(MEMORY | MASTER).to_le_bytes(), at).expect("its command");
    }
}

// Commands of `linux/vfio.h`, of which the bindings only have the parts.
const SET_CONTAINER: u32 = command(4);
const SET_IOMMU: u32 = command(2);
const GET_DEVICE: u32 = command(6);
const REGION_INFO: u32 = command(8);
const MAP_DMA: u32 = command(13);
const UNMAP_DMA: u32 = command(14);

const fn command(number: u32) -> u32 {
    (vfio::VFIO_TYPE as u32) << 8 | (vfio::VFIO_BASE + number)
}

fn call(file: &OwnedFd, command: u32, argument: u64) -> Result<u64, Errno> {
    sys::ioctl(file.as_fd(), command, argument)
}

fn open(path: &str) -> OwnedFd {
    OpenOptions::new().read(true).write(true).open(path).expect(path).into()
}

/// The first device of the driver.
fn address() -> Option<String> {
    let entries = fs::read_dir(DRIVER).ok()?;
    let mut names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.find(|name| name.contains(':'))
}

/// The group of devices that the IOMMU cannot distinguish.
fn group_of(address: &str) -> String {
    let link = fs::read_link(Path::new(DRIVER).join(address).join("iommu_group"));
    let name = link.ok().and_then(|link| Some(link.file_name()?.to_str()?.to_owned()));
    name.expect("a group of the IOMMU")
}

fn device_of(group: &OwnedFd, address: &str) -> File {
    let name = CString::new(address).expect("no zeros");
    let number = call(group, GET_DEVICE, name.as_ptr().expose_provenance() as u64)
        .expect("VFIO_GROUP_GET_DEVICE_FD");
    // SAFETY: the descriptor is new and has no other owner.
    unsafe { File::from_raw_fd(number as RawFd) }
}

/// Where a region of the device is in its file.
fn region(device: &File, index: u32) -> u64 {
    let argsz = size_of::<vfio::vfio_region_info>() as u32;
    let mut info = vfio::vfio_region_info { argsz, index, ..Default::default() };
    let address = (&raw mut info).expose_provenance() as u64;
    sys::ioctl(device.as_fd(), REGION_INFO, address).expect("VFIO_DEVICE_GET_REGION_INFO");
    info.offset
}
