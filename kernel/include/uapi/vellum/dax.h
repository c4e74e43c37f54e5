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
	__u64 features;		/* VELLUM_DAX_HAS_* */
	__u64 flags;		/* the flags that OPEN knows */
};

/* There are heaps, for ephemeral mappings. */
#define VELLUM_DAX_HAS_HEAPS		(1ULL << 0)
/* Tables outlive their last user; there is TABLES. */
#define VELLUM_DAX_KEEPS_TABLES		(1ULL << 1)
/* Tables that root has stored are looked for. */
#define VELLUM_DAX_READS_STORED		(1ULL << 2)

/*
 * Opens the table of a file, and makes it if there is none. Returns a descriptor with the file
 * descriptor's rights to read and write. The table is in use as long as there is a descriptor, a
 * mapping or an attachment of it. Then it is kept for the next use, as long as the kernel has the
 * file's inode cached and does not need the memory. A kept table does not keep the file: its blocks
 * are free once its last link has gone, and its file system can be unmounted.
 *
 * Errors: EBADF there is no such descriptor, or it is not for reading; EOPNOTSUPP the file is no
 * regular file on a file system that was mounted for DAX, with blocks of 4 KiB, or has DAX by its
 * own flag; EACCES the file is only appended to; EFBIG it is longer than the longest mapping;
 * EINVAL a flag is unknown; EINTR; ENOMEM; EMFILE.
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
	__u64 attachments;	/* to heaps of all processes, with those that wait for a flush */
	__u64 stored;		/* pages whose blocks a stored table has named */
};

/* All tables in this kernel, and how often things happened. In: size. Out: all fields. */
struct vellum_dax_tables {
	__u32 size;		/* of this structure */
	__u32 reserved;		/* 0 */
	__u64 tables;		/* now, with those that are kept */
	__u64 kept;		/* that nothing uses */
	__u64 kept_bytes;	/* of memory that these take */
	__u64 kept_most;	/* the bound: parameter dax_kept_kib of the module */
	__u64 resumed;		/* kept tables that were used again, since the module was loaded */
	__u64 evicted;		/* that have gone with their inodes */
	__u64 reclaimed;	/* that have gone because of the bound, or as memory was short */
	__u64 stored_used;	/* stored tables that tables were made from */
	__u64 stored_refused;	/* that were not right, or not root's */
};

/*
 * A stored table says where the blocks of a file are, so that the kernel need not ask the file
 * system for them one by one when it makes the file's table. It is a file on the same file system:
 * `.vellum-tables/NUMBER`, from the file system's root, with the number of the file's inode in
 * decimal. It has this header, and then runs: pages in a row in blocks in a row, in the order of
 * the pages. All numbers are little-endian.
 *
 * The kernel uses it if the folder and the file are root's, and no other user may write them, if
 * all fields and the checksum are right, and as far as the file system confirms each run. Otherwise
 * it asks the file system for the blocks of all pages. Pages in no run, too, are asked for.
 *
 * The checksum begins as 0. For each word of 8 bytes it becomes the exclusive or of itself and the
 * word, times VELLUM_DAX_STORED_PRIME.
 */
struct vellum_dax_stored {
	__u64 magic;		/* VELLUM_DAX_STORED_MAGIC */
	__u32 version;		/* VELLUM_DAX_STORED_VERSION */
	__u32 runs;		/* how many follow */
	__u64 inode;		/* the file's */
	__u32 generation;	/* of the inode */
	__u32 reserved;		/* 0 */
	__u64 length;		/* of the file, in bytes */
	__u64 uuid_first;	/* of the file system: bytes 0 to 7 */
	__u64 uuid_last;	/* bytes 8 to 15 */
	__u64 checksum;		/* of header and runs; with 0 here while it is computed */
};

struct vellum_dax_run {
	__u64 block;		/* the first one, from the file system's beginning */
	__u32 page;		/* the first one, from the file's beginning */
	__u32 pages;
};

#define VELLUM_DAX_STORED_MAGIC		0x656c626154786144ULL	/* "DaxTable" */
#define VELLUM_DAX_STORED_VERSION	1
#define VELLUM_DAX_STORED_PRIME		0x100000001b3ULL
/* The most runs. */
#define VELLUM_DAX_STORED_RUNS		(1 << 20)

/*
 * Ephemeral mappings. A heap is one mapping of a process, made once, in which any thread maps parts
 * of files by an ioctl, without the locks and the bookkeeping of mmap:
 *
 *	struct vellum_dax_heap open = { .size = sizeof(open) };
 *	struct vellum_dax_attach attach = { .size = sizeof(attach) };
 *
 *	heap = ioctl(device, VELLUM_DAX_HEAP, &open);
 *	mmap(NULL, 64ULL << 30, PROT_READ, MAP_SHARED, heap, 0);
 *	attach.file = open("/mnt/pmem/page.html", O_RDONLY | O_CLOEXEC);
 *	ioctl(heap, VELLUM_DAX_ATTACH, &attach);
 *	send(socket, (void *)attach.address, attach.length, 0);
 *	ioctl(heap, VELLUM_DAX_DETACH, attach.address);
 *
 * Each process makes its own heap, and maps it once. The mapping is MAP_SHARED, and a multiple of
 * 1 GiB, up to the longest mapping; it is for reading, or for reading and writing, as the heap was
 * opened. The kernel chooses an address that is aligned. The heap lives as long as its descriptor
 * or its mapping.
 *
 * Nothing but ATTACH and DETACH changes what is in a heap: munmap, mprotect and mremap of a part,
 * and mprotect of all, are EINVAL. A heap ends when all of it is unmapped, when mremap tries to
 * move it, and when its process forks after MADV_DOFORK. Then ATTACH is ENXIO, and an access is
 * SIGBUS, if the mapping is still there. A child has nothing of a heap: an access is SIGSEGV there.
 *
 * What is attached shows the file as it is, also what is appended within the attachment. An access
 * beyond the file's end is SIGBUS, and one to what is not attached is SIGSEGV. What the list above
 * says of code, of direct I/O and virtual machines, and of frozen file systems holds here, too.
 *
 * The program does not access the memory after DETACH, but a CPU may have it cached, until TLBs are
 * flushed for many detachments together. Until then the addresses are not used again, and the file
 * counts as open. That takes 50 ms at most.
 *
 * msync of a range, and fsync of the heap, make durable what was stored there.
 */
struct vellum_dax_heap {
	__u32 size;		/* of this structure */
	__u32 batch;		/* detachments that are flushed together; 0: 33 */
	__u64 flags;		/* VELLUM_DAX_HEAP_WRITES */
};

/* The heap is for reading and writing. */
#define VELLUM_DAX_HEAP_WRITES		(1ULL << 0)
/* The largest batch. */
#define VELLUM_DAX_MAX_BATCH		512

/*
 * Attaches a part of a file to a heap. A heap has slots of 2 MiB. An attachment takes a slot for
 * each unit of 2 MiB of the file that the part touches: in a row, and within one GiB of the heap.
 * The descriptor may be closed afterwards. If it is a table's, its flags hold for the attachment:
 * DURABLE, and NOSYNC, with which msync and fsync of the heap do nothing for it.
 *
 * Errors: ENXIO the heap is not mapped in this process, or has ended; EBADF; EOPNOTSUPP as for
 * OPEN; EACCES the heap is for writing, and the descriptor is not, or the file is only appended to;
 * ETXTBSY the same, and the file is swapped to; EINVAL no length, and the file has no byte at the
 * offset, or an end beyond the longest mapping; EFBIG the part touches more than 512 units; ENOSPC
 * so many slots in a row are not free; EINTR; ENOMEM; errors of the file system.
 */
struct vellum_dax_attach {
	__u32 size;		/* of this structure */
	__s32 file;		/* descriptor of the file, or of its table */
	__u64 offset;		/* in the file, in bytes */
	__u64 length;		/* in bytes; 0: up to the file's end, and out: that length */
	__u64 address;		/* out: of the byte at the offset */
};

/*
 * DETACH takes an address as its argument, and ends the attachment that has this address in one of
 * its slots.
 *
 * Errors: EINVAL nothing is attached there; ENXIO as for ATTACH.
 *
 * REAP flushes at once for all that was detached, and waits for those that other threads flush for.
 * It has no argument.
 */

/* What is in a heap. In: size. Out: all fields. */
struct vellum_dax_heap_stat {
	__u32 size;		/* of this structure */
	__u32 batch;
	__u64 regions;		/* of 1 GiB that were used so far */
	__u64 taken;		/* slots that are attached, or wait for a flush */
	__u64 attached;		/* slots in which a file's table is now */
	__u64 served;		/* slots that the file system serves, page by page */
	__u64 zombies;		/* detachments that wait for a flush */
	__u64 attaches;		/* since the beginning, and so are the rest */
	__u64 detaches;
	__u64 flushes;		/* for detachments */
	__u64 served_faults;	/* handled by the file system */
};

#define VELLUM_DAX_QUERY	_IOWR('D', 1, struct vellum_dax_query)
#define VELLUM_DAX_OPEN		_IOW('D', 2, struct vellum_dax_open)
#define VELLUM_DAX_REFRESH	_IO('D', 3)
#define VELLUM_DAX_STAT		_IOWR('D', 4, struct vellum_dax_stat)
#define VELLUM_DAX_HEAP		_IOW('D', 5, struct vellum_dax_heap)
#define VELLUM_DAX_ATTACH	_IOWR('D', 6, struct vellum_dax_attach)
#define VELLUM_DAX_DETACH	_IO('D', 7)
#define VELLUM_DAX_REAP		_IO('D', 8)
#define VELLUM_DAX_HEAP_STAT	_IOWR('D', 9, struct vellum_dax_heap_stat)
#define VELLUM_DAX_TABLES	_IOWR('D', 10, struct vellum_dax_tables)

#endif /* _UAPI_VELLUM_DAX_H */
