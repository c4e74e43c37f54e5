/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * The interface of /dev/exmap.
 *
 * An exmap is a range of addresses, its surface. A program places page frames on the surface and
 * takes them off, page by page, in vectors. The frames come from a pool that belongs to the exmap.
 * One open of the device is one exmap.
 *
 *	fd = open("/dev/exmap", O_RDWR | O_CLOEXEC);
 *	ioctl(fd, VELLUM_EXMAP_CREATE, &create);
 *	surface = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
 *		       VELLUM_EXMAP_OFFSET_SURFACE);
 *	vector = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
 *		      VELLUM_EXMAP_OFFSET_INTERFACE(0));
 *	vector[0] = VELLUM_EXMAP_ENTRY(page, count);
 *	ioctl(fd, VELLUM_EXMAP_ALLOC, VELLUM_EXMAP_VECTOR(0, 1));
 *
 * Commands act on the caller's own surface. The device refuses them (EPERM) to a process other than
 * the one that mapped it. The device also speaks the interface of the published exmap module; see
 * exmap_published.h.
 */
#ifndef _UAPI_VELLUM_EXMAP_H
#define _UAPI_VELLUM_EXMAP_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* What mmap maps, by offset. */
#define VELLUM_EXMAP_OFFSET_SURFACE		0x0000000000000000ULL
/*
 * The last level of the surface's page tables, read-only: a 64-bit entry a page. Bit 0 says that
 * the page is there. The surface must be mapped first. Entries hold physical addresses. So a
 * process without CAP_SYS_ADMIN sees a copy of bit 0 alone. The copy is up to date when a command
 * returns, and costs each command a little more from then on.
 */
#define VELLUM_EXMAP_OFFSET_TABLES		0x1000000000000000ULL
/* The vector of interface n: one page. */
#define VELLUM_EXMAP_OFFSET_INTERFACE(n) \
	(0xe000000000000000ULL | ((unsigned long long)(n) << 12))

/* Limits of CREATE. */
#define VELLUM_EXMAP_MAX_INTERFACES		256
/* The number of entries in a vector. */
#define VELLUM_EXMAP_VECTOR_ENTRIES		512
/* The largest number of pages in an entry. */
#define VELLUM_EXMAP_ENTRY_PAGES		4095

/*
 * An entry of a vector. In: a range of pages. Out, in the same place: the outcome, which is an
 * error (negative, or 0) and the number of pages that the command was carried out for.
 */
#define VELLUM_EXMAP_ENTRY(page, count) \
	(((__u64)(count) << 52) | ((__u64)(page) & ((1ULL << 52) - 1)))
#define VELLUM_EXMAP_RESULT(entry)		((__s32)((entry) & 0xffffffff))
#define VELLUM_EXMAP_PAGES(entry)		((__u16)(((entry) >> 32) & 0xffff))

/* The argument of a vectored command: the interface, and the number of its entries. */
#define VELLUM_EXMAP_VECTOR(interface, entries) \
	((__u64)(interface) | ((__u64)(entries) << 16))

/* What this module can do. In: size. Out: all fields. */
struct vellum_exmap_query {
	__u32 size;		/* of this structure, as the caller knows it */
	__u32 version;		/* of the interface; 1 */
	__u64 features;		/* VELLUM_EXMAP_CAN_* below */
	__u64 flags;		/* the flags that CREATE knows */
	__u32 max_interfaces;
	__u32 vector_entries;
};

#define VELLUM_EXMAP_CAN_READ		(1ULL << 0)	/* READ, pread and preadv */
#define VELLUM_EXMAP_CAN_WRITE		(1ULL << 1)	/* WRITE, pwrite and pwritev */
#define VELLUM_EXMAP_CAN_SHOW_TABLES	(1ULL << 2)	/* VELLUM_EXMAP_OFFSET_TABLES */

/*
 * Gives the exmap its pool and its interfaces. Once, and before the surface is mapped.
 *
 * Errors: EBUSY the exmap has them; EINVAL a field is out of bounds, or a flag is unknown, or flags
 * exclude each other; EBADF there is no such descriptor, or its file cannot be read, or the file's
 * content is made up for each reader, as that of procfs and sysfs is; ENOMEM there is not enough
 * memory; EPERM the caller may not lock so much (RLIMIT_MEMLOCK).
 *
 * Locked memory is: the frames; 6 pages for each interface; and the page tables of the surface, a
 * page each. The surface has one table for each GiB from when it is mapped (mmap: ENOMEM), and one
 * for each 2 MiB in which there is a page. Empty tables are freed from time to time, and always
 * before the user's limit keeps a page from coming.
 */
struct vellum_exmap_create {
	__u32 size;		/* of this structure */
	__u32 interfaces;	/* 1 to VELLUM_EXMAP_MAX_INTERFACES; one a thread */
	__u64 flags;		/* VELLUM_EXMAP_* below */
	__u64 frames;		/* of the pool, at least 1; without those of blocks */
	__s32 backing;		/* descriptor of the file or block device to read from, or -1 */
	__u32 blocks;		/* blocks of 512 frames, with VELLUM_EXMAP_HUGE; otherwise 0 */
};

/*
 * Direct I/O, registered buffers and all else that pins pages may use the pages. A pinned page is
 * not freed (EBUSY). Without this flag such calls fail with EFAULT.
 */
#define VELLUM_EXMAP_PINNABLE		(1ULL << 0)
/*
 * A read of a page that is not there gives zeros. Without this flag, and for a write, it is
 * SIGSEGV.
 */
#define VELLUM_EXMAP_READS_ZEROS	(1ULL << 1)
/* Frames are on lists of the interfaces, which steal from each other (SIGMOD 2023, 4.4). */
#define VELLUM_EXMAP_STEALING		(1ULL << 2)
/*
 * HARVEST says which pages were accessed and written since they came to the surface, or since the
 * last HARVEST that cleared it. Without this flag pages count as accessed and written from the
 * start.
 */
#define VELLUM_EXMAP_TRACKS		(1ULL << 6)
/* The kernel may take free frames out of the pool when the machine is short of memory. */
#define VELLUM_EXMAP_SHRINKS		(1ULL << 7)
/*
 * Entries of 2 MiB may map pages. ALLOC of all 512 pages from a multiple of 512 on maps a block of
 * the pool by one entry, if none of the pages is there and a block is free. Otherwise ALLOC goes
 * page by page. FREE of all 512 takes that entry off. FREE or MOVE of a part first splits it into
 * 512 entries, which flushes TLBs. The frames of a block return to it, and cannot be used until all
 * of them are back: blocks are for entries of 2 MiB, the pool's other frames for single pages. A
 * page that is read is a single page.
 *
 * If the kernel does not have so many blocks in a row, the pool gets 512 more frames for each
 * missing block (STAT says how many blocks there are). Each block is charged as 512 frames. RESIZE
 * does not count blocks.
 *
 * Not together with PINNABLE, TRACKS, STEALING, NO_POOL and LOCK_TABLES (EINVAL). The tables of
 * such a surface cannot be mapped (EOPNOTSUPP).
 */
#define VELLUM_EXMAP_HUGE		(1ULL << 8)
/* For experiments: frames come from the kernel and go back to it. */
#define VELLUM_EXMAP_NO_POOL		(1ULL << 3)
/* For experiments: TLBs are flushed for every entry of a vector. */
#define VELLUM_EXMAP_FLUSH_EACH		(1ULL << 4)
/* For experiments: page-table entries change under the lock of their table. */
#define VELLUM_EXMAP_LOCK_TABLES	(1ULL << 5)

/*
 * Reports which pages of a range were accessed and which were written, as the CPUs have noted it in
 * the page tables: a bit a page, the first page's in bit 0 of the first word. CPUs do not note what
 * a device reads or writes, for direct I/O for example. A page that is not there has neither bit. A
 * null pointer asks for nothing. Returns the number of pages that are there.
 *
 * Errors: EINVAL the range is not within the surface, or a flag is unknown; ENODEV, EPERM as for
 * vectored commands; EFAULT.
 */
struct vellum_exmap_harvest {
	__u32 size;		/* of this structure */
	__u32 flags;		/* VELLUM_EXMAP_CLEAR_* */
	__u64 page;
	__u64 count;
	__u64 accessed;		/* pointers to (count + 63) / 64 words */
	__u64 written;
};

/*
 * Clear the notes. TLBs are flushed once, so all that happens from then on is noted. A write that
 * happens meanwhile is in this harvest or in the next one. Only with VELLUM_EXMAP_TRACKS.
 */
#define VELLUM_EXMAP_CLEAR_ACCESSED	(1U << 0)
#define VELLUM_EXMAP_CLEAR_WRITTEN	(1U << 1)

/*
 * Moves frames with their contents to other pages, and what HARVEST is to say of them. Pages that
 * are not there are left out. A frame stays where it is if the other page is there, or if the frame
 * is pinned. Meanwhile neither page is there. Returns the number of pages moved. The ranges must
 * not overlap. Other commands get the interface after each 512 pages. MOVE ends there if the
 * surface is unmapped (ENODEV if nothing was moved before).
 */
struct vellum_exmap_move {
	__u32 size;		/* of this structure */
	__u32 interface;
	__u64 from, to;		/* first pages */
	__u64 count;
};

/* Counters since CREATE. Those of vectored commands are in pages. */
struct vellum_exmap_stat {
	__u32 size;		/* in: of this structure */
	__u32 interfaces;
	__u64 frames;		/* of the pool; without those of blocks */
	__u64 resident;		/* frames on the surface */
	__u64 surface;		/* pages of the surface, 0 before it is mapped */
	__u64 tables;		/* page tables of the surface */
	__u64 allocated;
	__u64 freed;
	__u64 conflicts;	/* pages to allocate that were there */
	__u64 busy;		/* pages to free that were pinned */
	__u64 read;
	__u64 written;
	__u64 flushes;		/* of TLBs, for vectors */
	__u64 refills;		/* visits of interfaces to the shared list */
	__u64 attached;		/* times that the surface was put into the process' page tables */
	__u64 detached;
	__u64 blocks;		/* of the pool */
	__u64 blocks_free;	/* blocks with all of their frames */
	__u64 huge;		/* entries of 2 MiB on the surface */
	__u64 splits;		/* entries of 2 MiB that were split */
};

#define VELLUM_EXMAP_IOC		0xe9
#define VELLUM_EXMAP_QUERY		_IOWR(VELLUM_EXMAP_IOC, 0x00, struct vellum_exmap_query)
#define VELLUM_EXMAP_CREATE		_IOW(VELLUM_EXMAP_IOC, 0x01, struct vellum_exmap_create)
#define VELLUM_EXMAP_STAT		_IOWR(VELLUM_EXMAP_IOC, 0x02, struct vellum_exmap_stat)
/*
 * Returns a private descriptor: another one for the same exmap, for one thread, so that threads do
 * not count references in the same word. Argument: 0. The descriptor is closed on exec.
 */
#define VELLUM_EXMAP_CLONE		_IO(VELLUM_EXMAP_IOC, 0x03)

#define VELLUM_EXMAP_HARVEST		_IOW(VELLUM_EXMAP_IOC, 0x04, struct vellum_exmap_harvest)
#define VELLUM_EXMAP_MOVE		_IOW(VELLUM_EXMAP_IOC, 0x05, struct vellum_exmap_move)
/*
 * Gives the pool more frames, or takes free ones out of it. The argument is the number of frames
 * that the pool is to have, at least 1. Returns 0. Errors: ENOMEM there is no memory; EBUSY too
 * many frames are on the surface; in both cases the pool has come as near to the number as it could
 * (STAT). EPERM as for CREATE.
 */
#define VELLUM_EXMAP_RESIZE		_IO(VELLUM_EXMAP_IOC, 0x06)

/*
 * Vectored commands. The argument is a VELLUM_EXMAP_VECTOR. They return the number of entries with
 * an error, or -1 if they have read no entry: EINVAL there is no such interface, or there are too
 * many entries; ENODEV there is no pool, or no surface; EPERM another process has mapped the
 * surface.
 *
 * Errors of an entry: EINVAL the range is empty or not within the surface.
 */
/*
 * Puts frames on the pages that have none. Their contents are arbitrary, but the process' own or
 * zero. Fewer pages than asked: the others were there. ENOMEM the pool is empty, or the user may
 * not have the page tables (see CREATE); so many pages as the number says have got a frame before,
 * and keep it. No TLB is flushed.
 */
#define VELLUM_EXMAP_ALLOC		_IO(VELLUM_EXMAP_IOC, 0x10)
/*
 * Takes the frames off. Fewer pages than asked: the others were not there. EBUSY a page of the
 * range is pinned, and all of the range stays. TLBs are flushed once after all entries, and once
 * more for each 512 pages, or each 16 entries of 2 MiB.
 */
#define VELLUM_EXMAP_FREE		_IO(VELLUM_EXMAP_IOC, 0x11)
/*
 * Reads pages that are not there from the backing file, page n from byte n * 4096, all entries at
 * the same time. A page is there when its data is. Pages that are there are left alone. ENOMEM the
 * pool is empty; ENODATA the file is shorter; otherwise the error of the device. A page that could
 * not be read is not there. EINTR, of the command: the process was killed.
 */
#define VELLUM_EXMAP_READ		_IO(VELLUM_EXMAP_IOC, 0x12)
/*
 * pread and preadv with an offset of interface | VELLUM_EXMAP_OP_REFRESH << 8 read the parts of the
 * surface that are the buffers. Pages that are not there come, and pages that are there are read
 * again. The calls return bytes, up to the first page that could not be read. The other opcodes are
 * those of the published interface.
 */
#define VELLUM_EXMAP_OP_REFRESH		4
/*
 * Writes pages that are there to the backing file, all entries at the same time. ENOENT a page is
 * not there; then nothing of its entry is written. Meanwhile the pages cannot be freed (EBUSY).
 */
#define VELLUM_EXMAP_WRITE		_IO(VELLUM_EXMAP_IOC, 0x13)

#endif /* _UAPI_VELLUM_EXMAP_H */
