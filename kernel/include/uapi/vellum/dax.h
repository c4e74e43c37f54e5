/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * The interface of file tables.
 *
 * A file table is the page tables of a file on byte-addressable storage, made before any process
 * needs them. Its leaves are the file's blocks. A process maps the file by one entry of its own
 * page tables for each GiB, or 512 GiB, and only the first access faults. All processes that map
 * the file share the tables (Alverti et al., "DaxVM", MICRO '22, section IV).
 *
 *	device = open("/dev/vellum-dax", O_RDWR | O_CLOEXEC);
 *	open.file = open("/mnt/pmem/model", O_RDONLY | O_CLOEXEC);
 *	table = ioctl(device, VELLUM_DAX_OPEN, &open);
 *	address = mmap(NULL, VELLUM_DAX_EXTENT(length), PROT_READ, MAP_SHARED, table, 0);
 *
 * The mapping shows the file as it is. Where the table has no leaf (a hole, a block that was never
 * written, an end that has just been appended), the file system serves the access, as it serves
 * every access of an ordinary mapping. From then on it serves the whole mapping, until the table is
 * complete again and the mapping has its entries back: the kernel does that by and by, REFRESH does
 * it at once. When the file loses blocks, every mapping loses the table before they are free.
 *
 * What a program may notice:
 *
 * - A mapping begins at the file's beginning. Its length and its address are multiples of 2 MiB; of
 *   1 GiB if it may not write. It is MAP_SHARED, and shows all of the file that is within its
 *   length, whatever is appended later. An access beyond the file's end is SIGBUS.
 * - It can be unmapped, and its rights changed, as a whole only (EINVAL). A child does not have it;
 *   after MADV_DOFORK it has the pages that the file system has served, and no others.
 * - Code cannot be executed in it (EACCES). Its pages cannot be the memory of direct I/O or of a
 *   virtual machine, nor hold a futex that processes share, nor does a debugger see them: a program
 *   must not rely on it that such a call works while the file system serves the mapping.
 * - msync, and fsync of the table's descriptor, make durable what was stored through the table by
 *   any process. fsync of the file's own descriptor does not.
 * - Stores go on while the file system is frozen.
 */
#ifndef _UAPI_VELLUM_DAX_H
#define _UAPI_VELLUM_DAX_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* The units of a mapping, in bytes: one that may be written, and any. */
#define VELLUM_DAX_UNIT			(1ULL << 21)
#define VELLUM_DAX_READ_UNIT		(1ULL << 30)
/* The longest mapping, in bytes. */
#define VELLUM_DAX_MAX_EXTENT		(1ULL << 39)
/* The length of a mapping, with any rights, that shows so many bytes. */
#define VELLUM_DAX_EXTENT(length) \
	(((length) + VELLUM_DAX_READ_UNIT - 1) & ~(VELLUM_DAX_READ_UNIT - 1))

/* What this module can do. In: size. Out: all fields. */
struct vellum_dax_query {
	__u32 size;		/* of this structure, as the caller knows it */
	__u32 version;		/* of the interface; 1 */
	__u64 features;		/* none so far */
	__u64 flags;		/* the flags that OPEN knows */
};

/*
 * Opens the table of a file, and makes it if no process has it open. Returns a descriptor with the
 * file descriptor's rights to read and write. The table lives as long as a descriptor or a mapping
 * of it.
 *
 * Errors: EBADF there is no such descriptor, or it is not for reading; EOPNOTSUPP the file is no
 * regular file on a file system that was mounted for DAX, with blocks of 4 KiB; EACCES the file is
 * only appended to; EFBIG it is longer than the longest mapping; EINVAL a flag is unknown; EINTR;
 * ENOMEM; EMFILE.
 */
struct vellum_dax_open {
	__u32 size;		/* of this structure */
	__s32 file;		/* descriptor */
	__u64 flags;		/* VELLUM_DAX_* below */
};

/*
 * The table shows a block only after the file system's own record of it is durable. So bytes that a
 * program has flushed from the CPU's caches survive a loss of power, without fsync. A mapping may
 * have MAP_SYNC then, and without this flag it may not (EOPNOTSUPP). Holds for all users of the
 * table from then on.
 */
#define VELLUM_DAX_DURABLE		(1ULL << 0)
/*
 * The program flushes what it stores, and msync and fsync of this descriptor do nothing. Only
 * together with DURABLE.
 */
#define VELLUM_DAX_NOSYNC		(1ULL << 1)

/*
 * REFRESH brings the table up to date with the file, and gives all mappings their entries back. It
 * has no argument.
 *
 * Errors: EBUSY the file lost blocks again and again meanwhile, and the file system serves accesses
 * for now; EINTR; ENOMEM; EFBIG; errors of the file system.
 */

struct vellum_dax_stat {
	__u32 size;		/* of this structure */
	__u32 order;		/* levels of tables: 1 covers 2 MiB, 2 1 GiB, 3 512 GiB */
	__u64 flags;		/* VELLUM_DAX_DURABLE */
	__u64 pages;		/* of the file, from the first, that the table was made for */
	__u64 leaves;		/* of these, those that the file has a written block for */
	__u64 tables;		/* pages that page tables take */
	__u64 mounts;		/* mappings of all processes */
	__u64 barred;		/* of these, those that the file system serves */
	__u64 stale;		/* 1: the table has to be refreshed before it is mapped again */
};

#define VELLUM_DAX_QUERY	_IOWR('D', 1, struct vellum_dax_query)
#define VELLUM_DAX_OPEN		_IOW('D', 2, struct vellum_dax_open)
#define VELLUM_DAX_REFRESH	_IO('D', 3)
#define VELLUM_DAX_STAT		_IOWR('D', 4, struct vellum_dax_stat)

#endif /* _UAPI_VELLUM_DAX_H */
