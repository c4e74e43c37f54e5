/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * The interface of Morsels.
 *
 * A Morsel is memory together with the page tables that map it: a process mounts it by one entry of
 * its own page tables, however large it is, and all who mount it share the tables. Each Morsel is a
 * file of the file system "morselfs", with a name, an owner and a mode; a directory and O_TMPFILE
 * makes one without a name.
 *
 *	mount -t morselfs -o size=50%,mode=1777 none /run/vellum/morsels
 *
 *	fd = open("/run/vellum/morsels/model", O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
 *	ioctl(fd, VELLUM_MORSEL_CREATE, &create);
 *	ioctl(fd, VELLUM_MORSEL_FILL, &fill);
 *	ioctl(fd, VELLUM_MORSEL_SEAL, VELLUM_MORSEL_SEAL_CONTENT);
 *	address = mmap(NULL, VELLUM_MORSEL_EXTENT(order), PROT_READ, MAP_SHARED, fd, 0);
 *
 * The usual calls do the usual things: read and write and splice; fallocate populates, and with
 * FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE takes pages off; fstat, fchmod, unlink; descriptors are
 * inherited and passed to other processes. A Morsel lives as long as a name, a descriptor or a
 * mapping.
 *
 * A mapping is all of the extent, at an address that is a multiple of it, and MAP_SHARED: a part of
 * it can be neither mapped nor unmapped, nor can its rights be changed for a part (EINVAL). Beyond
 * the Morsel's length, and where memory is missing, an access is SIGBUS.
 */
#ifndef _UAPI_VELLUM_MORSEL_H
#define _UAPI_VELLUM_MORSEL_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* What statfs says of the file system in f_type. */
#define VELLUM_MORSEL_MAGIC		0x4d6f7273

/*
 * Order n covers 512^n pages: 4 KiB, 2 MiB, 1 GiB, 512 GiB; and 256 TiB on processors whose page
 * tables have five levels, which QUERY says.
 */
#define VELLUM_MORSEL_MAX_ORDER		4
#define VELLUM_MORSEL_EXTENT(order)	(4096ULL << (9 * (order)))

/* What this module can do. In: size. Out: all. */
struct vellum_morsel_query {
	__u32 size;		/* of this structure, as the caller knows it */
	__u32 version;		/* of the interface; 1 */
	__u64 features;		/* none so far */
	__u64 flags;		/* the flags that CREATE knows */
	__u32 max_order;	/* 3; 4 where page tables have five levels */
	__u32 reserved;
};

/*
 * Gives a new file its shape, once. Its tables are made as they are needed: creation costs one.
 * ftruncate of a new file does the same, with the smallest order that is long enough and no flags.
 *
 * Errors: EBUSY it has one; EINVAL a field is out of bounds; EBADF the descriptor is not for
 * writing; ENOMEM; ENOSPC the file system is full, or the user may lock no more (RLIMIT_MEMLOCK).
 */
struct vellum_morsel_create {
	__u32 size;		/* of this structure */
	__u32 order;		/* 0 to the highest that QUERY says */
	__u64 length;		/* bytes, at least 1 and at most the extent */
	__u64 flags;		/* VELLUM_MORSEL_* below */
	__u64 address;		/* where every process has it, a multiple of the extent; or 0 */
};

/*
 * Pages may be the memory of direct I/O, of registered buffers, of anything that pins pages. Without
 * it such calls fail with EFAULT. Futexes between processes do so in every Morsel.
 */
#define VELLUM_MORSEL_PINNABLE		(1ULL << 0)
/*
 * Wherever 2 MiB are populated that have nothing yet, they come in one piece and are mapped by one
 * entry, if the kernel has so much in a row. Not together with PINNABLE; order 2 and above.
 */
#define VELLUM_MORSEL_HUGE		(1ULL << 1)
/* A child has the mapping, too, at the same address. Without it a child has nothing there. */
#define VELLUM_MORSEL_INHERIT		(1ULL << 2)

/*
 * Reads a file into the Morsel: straight into its pages if the source was opened with O_DIRECT,
 * several pieces at a time. Stops at the source's end, and at a signal if something was read.
 *
 * Errors: EBADF no such descriptor, or not for reading, or the Morsel's not for writing; EINVAL the
 * range is not within the Morsel, or not aligned as direct I/O needs it, or the source is no file or
 * block device, or is made up for each reader, as the files of procfs and sysfs are; EPERM the
 * content is sealed; ENODATA the source ends before the range begins;
 * ENOMEM, ENOSPC; what reading the source gives.
 * What was read before an error stays, and `filled` says how much it is.
 */
struct vellum_morsel_fill {
	__u32 size;		/* of this structure */
	__s32 source;		/* descriptor */
	__u64 from;		/* bytes from the source's beginning */
	__u64 offset;		/* bytes from the Morsel's beginning, a multiple of 4,096 */
	__u64 length;		/* bytes, at least 1 */
	__u64 filled;		/* out: bytes */
};

struct vellum_morsel_stat {
	__u32 size;		/* of this structure */
	__u32 order;
	__u64 length;
	__u64 flags;
	__u64 address;		/* that it is bound to, or 0 */
	__u64 pages;		/* that are there */
	__u64 huge;		/* entries of 2 MiB, whose pages are among those */
	__u64 tables;		/* pages that page tables take */
	__u64 mounts;		/* mappings, of whatever processes */
	__u64 seals;		/* VELLUM_MORSEL_SEAL_* */
};

/*
 * The argument of SEAL. From then on nothing changes what is there: neither write nor FILL nor
 * taking pages off (EPERM), and it is mapped for reading only (EPERM). Cannot be undone.
 *
 * Errors: EBUSY somebody has it mapped through a descriptor for writing, or a device or I/O that has
 * not ended has pages of it; EBADF the descriptor is not for writing; EINVAL unknown bits.
 */
#define VELLUM_MORSEL_SEAL_CONTENT	(1ULL << 0)
/* Holes stay holes: populating fails (EPERM), and an access to a page that is not there is SIGBUS. */
#define VELLUM_MORSEL_SEAL_POPULATION	(1ULL << 1)

/*
 * REVOKE takes it from everybody: all mappings lose it at once (SIGBUS from then on), commands
 * on descriptors are EIO, all memory is given back. Only its owner may, or who has CAP_FOWNER (EPERM).
 */

#define VELLUM_MORSEL_QUERY	_IOWR('M', 1, struct vellum_morsel_query)
#define VELLUM_MORSEL_CREATE	_IOW('M', 2, struct vellum_morsel_create)
#define VELLUM_MORSEL_FILL	_IOWR('M', 3, struct vellum_morsel_fill)
#define VELLUM_MORSEL_STAT	_IOWR('M', 4, struct vellum_morsel_stat)
#define VELLUM_MORSEL_SEAL	_IO('M', 5)
#define VELLUM_MORSEL_REVOKE	_IO('M', 6)

#endif /* _UAPI_VELLUM_MORSEL_H */
