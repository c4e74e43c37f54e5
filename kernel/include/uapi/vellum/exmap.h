/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * The interface of /dev/exmap.
 *
 * An exmap is a range of addresses, its surface, on which a program places page frames and from
 * which it takes them, page by page, in vectors. The frames come from a pool that belongs to the
 * exmap. One open of the device is one exmap.
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
 * Commands act on the caller's own surface: they are refused (EPERM) to a process other than the
 * one that mapped it. The device also speaks the interface of the published exmap module; see
 * exmap_published.h.
 */
#ifndef _UAPI_VELLUM_EXMAP_H
#define _UAPI_VELLUM_EXMAP_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* What mmap shows at which offset. */
#define VELLUM_EXMAP_OFFSET_SURFACE		0x0000000000000000ULL
/*
 * The last level of the surface's page tables, read-only: a 64-bit entry a page, of which bit 0 says
 * that the page is there. The surface must be mapped first. Entries hold physical addresses; so a
 * process without CAP_SYS_ADMIN sees a copy of bit 0 alone, which is up to date when a command
 * returns, and costs each command a little more from then on.
 */
#define VELLUM_EXMAP_OFFSET_TABLES		0x1000000000000000ULL
/* The vector of interface n: one page. */
#define VELLUM_EXMAP_OFFSET_INTERFACE(n) \
	(0xe000000000000000ULL | ((unsigned long long)(n) << 12))

/* Bounds of what CREATE takes. */
#define VELLUM_EXMAP_MAX_INTERFACES		256
/* Entries of a vector. */
#define VELLUM_EXMAP_VECTOR_ENTRIES		512
/* Pages of an entry. */
#define VELLUM_EXMAP_ENTRY_PAGES		4095

/*
 * An entry of a vector. In: a range of pages. Out, in the same place: what became of it, an error
 * (negative, or 0) and the number of pages for which the command was carried out.
 */
#define VELLUM_EXMAP_ENTRY(page, count) \
	(((__u64)(count) << 52) | ((__u64)(page) & ((1ULL << 52) - 1)))
#define VELLUM_EXMAP_RESULT(entry)		((__s32)((entry) & 0xffffffff))
#define VELLUM_EXMAP_PAGES(entry)		((__u16)(((entry) >> 32) & 0xffff))

/* The argument of a vectored command: which interface, and how many of its entries. */
#define VELLUM_EXMAP_VECTOR(interface, entries) \
	((__u64)(interface) | ((__u64)(entries) << 16))

/*
 * What this module can do. In: size. Out: all.
 */
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
 * Errors: EBUSY there are some already; EINVAL a field is out of bounds, or flags are given that
 * are unknown or cannot be had together; EBADF no such descriptor, or it cannot be read, or it is
 * made up for each reader, as the files of procfs and sysfs are; ENOMEM the memory is not there;
 * EPERM more than the caller may lock (RLIMIT_MEMLOCK).
 *
 * What counts as locked memory: the frames, 6 pages for each interface, and the page tables of the
 * surface, a page each: one for each GiB of the surface from when it is mapped (mmap: ENOMEM), and
 * one for each 2 MiB in which there is a page. Tables that have become empty are freed from time to
 * time, and always before the user's limit keeps a page from coming.
 */
struct vellum_exmap_create {
	__u32 size;		/* of this structure */
	__u32 interfaces;	/* 1 to VELLUM_EXMAP_MAX_INTERFACES; one a thread */
	__u64 flags;		/* VELLUM_EXMAP_* below */
	__u64 frames;		/* of the pool, at least 1; without those of blocks */
	__s32 backing;		/* descriptor of the file or block device to read from, or -1 */
	__u32 blocks;		/* of 512 frames, with VELLUM_EXMAP_HUGE; otherwise 0 */
};

/*
 * Pages may be the memory of direct I/O, of registered buffers, of anything that pins pages. A
 * page that is pinned is not freed (EBUSY). Without it such calls fail with EFAULT.
 */
#define VELLUM_EXMAP_PINNABLE		(1ULL << 0)
/* Reading a page that is not there gives zeros; without it, and for writing, it is SIGSEGV. */
#define VELLUM_EXMAP_READS_ZEROS	(1ULL << 1)
/* The frames are on lists of the interfaces, which steal from each other (SIGMOD 2023, 4.4). */
#define VELLUM_EXMAP_STEALING		(1ULL << 2)
/*
 * HARVEST says which pages were accessed and written since they came to the surface, or since the
 * last time. Without it pages count as accessed and written from the start.
 */
#define VELLUM_EXMAP_TRACKS		(1ULL << 6)
/* When the machine is short of memory, the kernel may take free frames out of the pool. */
#define VELLUM_EXMAP_SHRINKS		(1ULL << 7)
/*
 * Pages may be mapped by entries of 2 MiB: ALLOC of all 512 pages from a multiple of 512 on, none
 * of which is there, maps a block of the pool by one entry, if one is free; otherwise page by page,
 * as ever. FREE of all of them takes that entry off; FREE or MOVE of a part splits it into 512
 * entries before, which flushes TLBs. The frames of a block come back to it, and are nobody's until
 * all of them are there: blocks are for entries of 2 MiB, the pool's other frames for single pages.
 * A page that is read is one of those.
 *
 * Where the kernel does not have so many blocks in a row, the pool gets 512 more frames for each
 * that is missing (STAT says how many there are). Blocks are charged as 512 frames each; RESIZE
 * does not count them.
 *
 * Not together with PINNABLE, TRACKS, STEALING, NO_POOL and LOCK_TABLES (EINVAL); the tables of
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
 * Which pages of a range were accessed and which were written, as the processors have noted it in
 * the page tables: a bit a page, the first page's in bit 0 of the first word. Pages that are not
 * there have neither. A null pointer: that is not asked for. Returns how many pages are there.
 *
 * Errors: EINVAL the range is not within the surface, or unknown flags; ENODEV, EPERM as for
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
 * Forget it; TLBs are flushed once, so that what happens from then on is noted. A write that
 * happens meanwhile is in this harvest or in the next one. Only with VELLUM_EXMAP_TRACKS.
 */
#define VELLUM_EXMAP_CLEAR_ACCESSED	(1U << 0)
#define VELLUM_EXMAP_CLEAR_WRITTEN	(1U << 1)

/*
 * Moves frames with their contents to other pages. Pages that are not there are left out; where the
 * other page is there, or the frame is pinned, it stays. Meanwhile neither page is there. Returns
 * how many have been moved. The ranges must not overlap. Other commands have their turn with the
 * interface after each 512 pages. MOVE ends there if the surface is unmapped (ENODEV if nothing has
 * been moved before).
 */
struct vellum_exmap_move {
	__u32 size;		/* of this structure */
	__u32 interface;
	__u64 from, to;		/* first pages */
	__u64 count;
};

/* Counters since CREATE; those of vectored commands are in pages. */
struct vellum_exmap_stat {
	__u32 size;		/* in: of this structure */
	__u32 interfaces;
	__u64 frames;		/* of the pool; without those of blocks */
	__u64 resident;		/* frames on the surface */
	__u64 surface;		/* pages of the surface, 0 before it is mapped */
	__u64 tables;		/* page tables of the surface */
	__u64 allocated;
	__u64 freed;
	__u64 conflicts;	/* pages that were to be allocated, and were there */
	__u64 busy;		/* pages that were to be freed, and were pinned */
	__u64 read;
	__u64 written;
	__u64 flushes;		/* of TLBs, for vectors */
	__u64 refills;		/* visits of an interface to what all share */
	__u64 attached;		/* times that the surface was put into the process' page tables */
	__u64 detached;
	__u64 blocks;		/* of the pool */
	__u64 blocks_free;	/* of which all frames are there */
	__u64 huge;		/* entries of 2 MiB on the surface */
	__u64 splits;		/* entries of 2 MiB that became 512 */
};

#define VELLUM_EXMAP_IOC		0xe9
#define VELLUM_EXMAP_QUERY		_IOWR(VELLUM_EXMAP_IOC, 0x00, struct vellum_exmap_query)
#define VELLUM_EXMAP_CREATE		_IOW(VELLUM_EXMAP_IOC, 0x01, struct vellum_exmap_create)
#define VELLUM_EXMAP_STAT		_IOWR(VELLUM_EXMAP_IOC, 0x02, struct vellum_exmap_stat)
/*
 * A private descriptor: another one for the same exmap, for one thread, so that threads do not
 * count references in the same word. Argument: 0. Returns the descriptor, closed on exec.
 */
#define VELLUM_EXMAP_CLONE		_IO(VELLUM_EXMAP_IOC, 0x03)

#define VELLUM_EXMAP_HARVEST		_IOW(VELLUM_EXMAP_IOC, 0x04, struct vellum_exmap_harvest)
#define VELLUM_EXMAP_MOVE		_IOW(VELLUM_EXMAP_IOC, 0x05, struct vellum_exmap_move)
/*
 * Gives the pool more frames, or takes free ones out of it. The argument is how many it is to have,
 * at least 1. Returns 0, or ENOMEM if there is no memory, or EBUSY if so many are on the surface;
 * the pool has then come as near to it as it could (STAT). EPERM as for CREATE.
 */
#define VELLUM_EXMAP_RESIZE		_IO(VELLUM_EXMAP_IOC, 0x06)

/*
 * Vectored commands. The argument is a VELLUM_EXMAP_VECTOR. They return how many entries have an
 * error, or -1 if none was looked at: EINVAL no such interface, or too many entries; ENODEV no
 * pool, or no surface; EPERM another process.
 *
 * Errors of an entry: EINVAL the range is empty or not within the surface.
 */
/*
 * Puts frames on the pages that have none; their contents are arbitrary, but the process' own or
 * zero. Fewer pages than asked: the others were there. ENOMEM the pool is empty, or the user may not
 * have the page tables (see CREATE); as many pages as the number says have got a frame before, and
 * keep it. No TLB is flushed.
 */
#define VELLUM_EXMAP_ALLOC		_IO(VELLUM_EXMAP_IOC, 0x10)
/*
 * Takes the frames off. Fewer pages than asked: the others were not there. EBUSY a page of the
 * range is pinned, and all of the range stays. TLBs are flushed once after all entries, and once
 * more for each 512 pages, or each 16 entries of 2 MiB.
 */
#define VELLUM_EXMAP_FREE		_IO(VELLUM_EXMAP_IOC, 0x11)
/*
 * Reads pages that are not there from the backing file, page n from byte n * 4096; all entries at
 * a time. A page is there when its data is. Pages that are there are left alone. ENOMEM the pool
 * is empty; ENODATA the file is shorter; otherwise what the device says. A page that could not
 * be read is not there. EINTR, of the command: the process was killed.
 */
#define VELLUM_EXMAP_READ		_IO(VELLUM_EXMAP_IOC, 0x12)
/*
 * pread and preadv with an offset of interface | VELLUM_EXMAP_OP_REFRESH << 8 read the parts of the
 * surface that are the buffers: pages that are not there come, pages that are there are read again.
 * They return bytes, up to the first page that could not be read. The other opcodes are those of
 * the published interface.
 */
#define VELLUM_EXMAP_OP_REFRESH		4
/*
 * Writes pages that are there to the backing file, all entries at a time. ENOENT a page is not
 * there; then nothing of its entry is written. The pages may not be freed meanwhile (EBUSY).
 */
#define VELLUM_EXMAP_WRITE		_IO(VELLUM_EXMAP_IOC, 0x13)

#endif /* _UAPI_VELLUM_EXMAP_H */
