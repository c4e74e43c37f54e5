/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * The interface of Morsels.
 *
 * A Morsel is memory together with the page tables that map it. A process mounts it by one entry of
 * its own page tables, however large it is, and all processes that mount it share the tables. Each
 * Morsel is a file of the file system "morselfs", with a name, an owner and a mode. An open of a
 * directory with O_TMPFILE makes one without a name.
 *
 *	mount -t morselfs -o size=50%,mode=1777 none /run/vellum/morsels
 *
 *	fd = open("/run/vellum/morsels/model", O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
 *	ioctl(fd, VELLUM_MORSEL_CREATE, &create);
 *	ioctl(fd, VELLUM_MORSEL_FILL, &fill);
 *	ioctl(fd, VELLUM_MORSEL_SEAL, VELLUM_MORSEL_SEAL_CONTENT);
 *	address = mmap(NULL, VELLUM_MORSEL_EXTENT(order), PROT_READ, MAP_SHARED, fd, 0);
 *
 * The usual calls do the usual things: read, write and splice; fallocate populates, and with
 * FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE takes pages off; fstat, fchmod, unlink; descriptors
 * are inherited and passed to other processes. A Morsel lives as long as it has a name, a
 * descriptor or a mapping.
 *
 * A mapping covers all of the extent, at an address that is a multiple of the extent, and is
 * MAP_SHARED. A part of it can be neither mapped nor unmapped, and the rights of a part cannot
 * change (EINVAL). An access beyond the Morsel's length, or where memory is missing, is SIGBUS.
 */
#ifndef _UAPI_VELLUM_MORSEL_H
#define _UAPI_VELLUM_MORSEL_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* The file system's f_type in statfs. */
#define VELLUM_MORSEL_MAGIC		0x4d6f7273

/*
 * Order n covers 512^n pages: 4 KiB, 2 MiB, 1 GiB, 512 GiB; and 256 TiB on CPUs whose page tables
 * have five levels. QUERY says so.
 */
#define VELLUM_MORSEL_MAX_ORDER		4
#define VELLUM_MORSEL_EXTENT(order)	(4096ULL << (9 * (order)))

/* What this module can do. In: size. Out: all fields. */
struct vellum_morsel_query {
	__u32 size;		/* of this structure, as the caller knows it */
	__u32 version;		/* of the interface; 1 */
	__u64 features;		/* none so far */
	__u64 flags;		/* the flags that CREATE knows */
	__u32 max_order;	/* 3; 4 where page tables have five levels */
	__u32 reserved;
};

/*
 * Gives a new file its shape, once. Tables are made as they are needed: creation costs one.
 * ftruncate of a new file does the same, with the smallest order that is long enough and no flags.
 *
 * Errors: EBUSY the file has a shape; EINVAL a field is out of bounds; EBADF the descriptor is not
 * for writing; ENOMEM; ENOSPC the file system is full, or the user may lock no more
 * (RLIMIT_MEMLOCK).
 */
struct vellum_morsel_create {
	__u32 size;		/* of this structure */
	__u32 order;		/* 0 to the highest that QUERY says */
	__u64 length;		/* bytes, at least 1 and at most the extent */
	__u64 flags;		/* VELLUM_MORSEL_* below */
	__u64 address;		/* the address in every process, a multiple of the extent; or 0 */
};

/*
 * Direct I/O, registered buffers and all else that pins pages may use the pages. Without this flag
 * such calls fail with EFAULT. Futexes between processes fail so in every Morsel.
 */
#define VELLUM_MORSEL_PINNABLE		(1ULL << 0)
/*
 * Where 2 MiB are populated that have no page yet, they come in one piece and one entry maps them,
 * if the kernel has 2 MiB in a row. Not together with PINNABLE; order 2 and above.
 */
#define VELLUM_MORSEL_HUGE		(1ULL << 1)
/*
 * A child has the mapping, too, at the same address. Without this flag a child has nothing there.
 */
#define VELLUM_MORSEL_INHERIT		(1ULL << 2)

/*
 * Reads a file into the Morsel: straight into its pages if the source was opened with O_DIRECT,
 * several pieces at a time. Stops at the source's end, and at a signal if something was read.
 *
 * Errors: EBADF there is no such descriptor, or it is not for reading, or the Morsel's is not for
 * writing; EINVAL the range is not within the Morsel, or not aligned as direct I/O needs it, or the
 * source is no file or block device, or its content is made up for each reader, as that of procfs
 * and sysfs is; EPERM the content is sealed; ENODATA the source ends before the range begins;
 * ENOMEM, ENOSPC; errors of reading the source. Bytes that were read before an error stay, and
 * `filled` counts them.
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
	__u64 address;		/* the address that it is bound to, or 0 */
	__u64 pages;		/* that are there */
	__u64 huge;		/* entries of 2 MiB, whose pages are counted above */
	__u64 tables;		/* pages that page tables take */
	__u64 mounts;		/* mappings of all processes */
	__u64 seals;		/* VELLUM_MORSEL_SEAL_* */
};

/*
 * The argument of SEAL. From then on the content does not change: write, FILL and taking pages off
 * fail (EPERM), and it is mapped for reading only (EPERM). Cannot be undone.
 *
 * Errors: EBUSY there is a mapping through a descriptor for writing, or a device or I/O that has
 * not ended has pages of it; EBADF the descriptor is not for writing; EINVAL a bit is unknown.
 */
#define VELLUM_MORSEL_SEAL_CONTENT	(1ULL << 0)
/*
 * Holes stay holes: populating fails (EPERM), and an access to a page that is not there is SIGBUS.
 */
#define VELLUM_MORSEL_SEAL_POPULATION	(1ULL << 1)

/*
 * REVOKE takes the Morsel away from all processes: all mappings lose it at once (SIGBUS from then
 * on), commands on descriptors fail with EIO, and all memory is given back. Only the owner, or a
 * process with CAP_FOWNER, may do that (EPERM).
 */

#define VELLUM_MORSEL_QUERY	_IOWR('M', 1, struct vellum_morsel_query)
#define VELLUM_MORSEL_CREATE	_IOW('M', 2, struct vellum_morsel_create)
#define VELLUM_MORSEL_FILL	_IOWR('M', 3, struct vellum_morsel_fill)
#define VELLUM_MORSEL_STAT	_IOWR('M', 4, struct vellum_morsel_stat)
#define VELLUM_MORSEL_SEAL	_IO('M', 5)
#define VELLUM_MORSEL_REVOKE	_IO('M', 6)

#endif /* _UAPI_VELLUM_MORSEL_H */
