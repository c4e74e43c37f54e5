/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A file table: page tables whose leaves are the blocks of a file on byte-addressable storage.
 *
 *	device.c	the device, and operations on a table's descriptor
 *	table.c		a table's life; bringing it up to date with its file
 *	kept.c		all tables; those that have no user, and stay
 *	blocks.c	where a file's blocks are in memory
 *	stored.c	where root has written down that they are
 *	watch.c		notices when a file loses blocks, and when its inode leaves the cache
 *	map.c		mapping, faults, rights; the file system serves what the table cannot
 *	sync.c		making durable what CPUs have stored
 *	heap.h		ephemeral mappings, in files of their own
 *	check.c		self-check in debugfs
 *
 * The danger is a block that is another file's while a leaf still leads to it. Three rules keep
 * every CPU from reaching it:
 *
 * - A file loses blocks in this order: its invalidation lock is held for writing; the kernel unmaps
 *   the pages from all processes; blocks become free; the lock is released. watch.c marks the pages
 *   as stale at the beginning of the second step. In the course of that step every mount over these
 *   pages is detached by its notifier: its VMA is among the file's.
 * - A mount is attached only under the file's invalidation lock, held for reading, and only if
 *   nothing is stale. It is attached in a fault, when its VMA is among the file's, and not in mmap.
 * - Pages stop being stale only under the same lock, after their leaves were compared with the
 *   file's blocks, and if nothing was marked meanwhile.
 *
 * So a leaf may be wrong, but no mount leads to it. A refresh, which corrects it, asks the file
 * system for blocks. That takes the inode's lock, which a thread may hold that has faulted: so
 * nothing is refreshed in a fault, or under the mmap lock.
 *
 * A table stays when its last user has gone, without any reference to its inode, its file system or
 * its file: the file system is unmounted, and the inode is evicted, as if there were no table. So
 * two things matter:
 *
 * - The table is found by the address of the file's mapping, which is a part of the inode. The
 *   kernel evicts every inode by clear_inode() before it frees it (evict() insists on that), and
 *   ext4 frees it a grace period later. watch.c takes the table out of the hash at the beginning of
 *   clear_inode(). So no other inode can have that address while the table is found. An fsnotify
 *   mark without a reference to the inode would tell of its end, too, but later, and the module
 *   would make a mark for each table. Lost blocks are told by ftrace in any case.
 * - An inode without a link loses its blocks in its eviction, before clear_inode(), and nothing
 *   unmaps its pages. The table's leaves are wrong from then on, and no thread can become its user:
 *   a user has a descriptor of the file, and an inode that is being evicted gets no descriptor any
 *   more. For the same reason everything that looks at an inode has a descriptor, or pins the
 *   inode and the file system (a visit).
 *
 * Everything else is as for a table that has users and no mount. Notices of lost blocks find it,
 * the invalidation lock and the generation are checked when it is attached again. What was stored
 * is written back by its last user.
 *
 * Locks: building > inode lock > mmap lock > invalidation lock > syncing > shape > locks of mounts
 * > locks of page tables > the lock of all tables > lock. The kernel takes the lock of all tables
 * when it needs memory, and when it evicts an inode; the inode's spinlock may be taken under it.
 */
#ifndef VELLUM_DAX_H
#define VELLUM_DAX_H

#include <linux/fs.h>
#include <linux/kref.h>
#include <linux/mutex.h>
#include <linux/path.h>
#include <linux/refcount.h>
#include <linux/rwsem.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/workqueue.h>
#include <vellum/dax.h>

#include "core/compat.h"
#include "core/pt_mount.h"
#include "core/pt_mounts.h"
#include "core/pt_tree.h"

struct dax_device;
struct dax_kept;
struct dax_stored;

/*
 * A block's leaf. Nothing may pin the page: the file system would not see such a reference when it
 * frees the block. CPUs note stores in it. Leaves change under the lock of their table, because the
 * core reads and writes them under it.
 */
#define DAX_LEAF_FLAGS	((PT_LEAF_FLAGS & ~_PAGE_DIRTY) | _PAGE_SPECIAL)

/* The highest order of a table. */
#define DAX_MAX_ORDER	PG_LEVEL_1G

/* What a refresh that is to come needs to open the file. It is not a user's descriptor. */
struct dax_return {
	struct path		path;
	const struct cred	*cred;		/* NULL: no refresh is to come */
};

struct dax_table {
	/* Descriptors, mounts, attachments, work; each has a descriptor of the file, or a path */
	refcount_t		users;
	struct kref		references;	/* the hash, visits */
	struct hlist_node	node;		/* in the hash */
	struct list_head	kept;		/* among those without a user */
	struct list_head	limited;	/* among those that the same limit bounds... */
	struct dax_kept		*limited_by;	/* ...which are these; NULL: no limit does */
	u64			kept_pages;	/* of memory, while it is kept */
	struct address_space	*mapping;	/* of the file; unsafe without a user */
	struct dax_device	*device;	/* may be taken away meanwhile */
	u64			offset;		/* bytes on the device before the file system's */
	struct rcu_head		walked;		/* after the last walk of its page tables */
	struct work_struct	destruction;
	struct delayed_work	returning;	/* refreshes, and unbars the mounts */

	struct mutex		building;	/* one refresh at a time; leaves change under it */
	struct rw_semaphore	shape;		/* the tree's root and order */
	struct pt_tree		tree;
	struct pt_mounts	mounts;
	spinlock_t		attachments_lock;	/* protects the next one */
	struct list_head	attachments;	/* to heaps, zombies included (heap.h) */
	bool			was_attached;	/* to a heap, since it was made */
	bool			is_written;	/* a mapping may have stored something */
	bool			is_stored;	/* something was, and the times do not say so */
	struct mutex		syncing;	/* one sync at a time */

	spinlock_t		lock;		/* protects all below */
	u64			pages;		/* from the first one, that were looked up */
	u64			reach;		/* pages from here on have no leaf */
	/* Pages whose blocks may have changed since they were looked up; none if equal. */
	u64			stale_first, stale_end;
	u64			notices;	/* how often pages were marked as stale */
	u64			unmaps;		/* how often the kernel unmapped pages */
	bool			misses;		/* pages before the end may lack leaves */
	u32			generation;	/* of the inode, when pages were looked up */
	bool			is_durable;
	bool			was_looked_for;	/* whether there is a stored table */
	u64			stored;		/* pages that it has named the blocks of */
	u64			missing;	/* no page below lacks a leaf */
	unsigned long		pause;		/* before the next return, in jiffies */
	struct dax_return	return_to;
};

static inline struct inode *dax_inode(const struct dax_table *table)
{
	return table->mapping->host;
}

/* A descriptor of a table. */
struct dax_handle {
	struct dax_table	*table;
	struct file		*file;		/* the descriptor that the table was opened by */
	u64			flags;
};

/* kept.c */
/* Returns the file's table, which has a user more. */
struct dax_table *dax_table_open(const struct file *file);
/* A user more. There is one already. */
void dax_table_get(struct dax_table *table);
/*
 * A user less. `file` is a descriptor of the file, which the caller puts later; NULL: the file's
 * times are not updated.
 */
void dax_table_put(struct dax_table *table, struct file *file);
/* The file loses these pages. Must not sleep. */
void dax_table_notice(const struct address_space *mapping, u64 first, u64 count);
/* The inode of the mapping is being evicted. Must not sleep. */
void dax_table_evict(const struct address_space *mapping);
/* For self-checks: calls the function for each table. */
int dax_tables_each(void (*visit)(void *data, struct dax_table *table), void *data);
void dax_tables_count(struct vellum_dax_tables *counts);
int dax_tables_start(void);
void dax_tables_end(void);

/* What files' users may delay; and what frees memory. */
extern struct workqueue_struct *dax_work, *dax_end_work;

/* table.c */
/* Makes a table that has one user, and no leaves. */
struct dax_table *dax_table_make(const struct file *file);
/* Frees a table that no other thread has seen. */
void dax_table_discard(struct dax_table *table);
/* Frees a table that no thread finds any more. Does not sleep. */
void dax_table_destroy_later(struct dax_table *table);
/* The table has no user any more, or has one again. Do not sleep. */
void dax_table_rest(struct dax_table *table);
void dax_table_resume(struct dax_table *table);
/* Marks pages as stale, and takes them out of attachments. Must not sleep. */
void dax_table_lose(struct dax_table *table, u64 first, u64 end);
/*
 * Brings the table up to date, and unbars its mounts. `file` is a descriptor of the file, which
 * stays as it is.
 *
 * Errors: EBUSY pages became stale again and again; EFBIG; EINTR; ENOMEM; those of the file system.
 */
int dax_table_refresh(struct dax_table *table, const struct file *file);
/* Refreshes the table after a pause. */
void dax_table_refresh_later(struct dax_table *table, const struct file *file);
/*
 * Cancels a refresh that was to come later and has not begun. True: the caller is a user in its
 * place, and puts what it needed of the file. Does not sleep; under RCU the caller need be no user.
 */
bool dax_table_cancel_refresh(struct dax_table *table, struct dax_return *taken);
void dax_return_put(const struct dax_return *taken);
/*
 * Refreshes the table. From now on it has a leaf only for a block that is durably the file's.
 */
int dax_table_make_durable(struct dax_table *table, const struct file *file);
/* Makes the tree have this order at least. `shape` is held for writing. */
int dax_table_grow(struct dax_table *table, unsigned int order);
/* Makes the tables of level 2 for so many pages. `shape` is held. */
int dax_table_make_room(struct dax_table *table, u64 pages);
/* Whether the page has a leaf that may be shown. The file's invalidation lock is held. */
bool dax_table_shows(struct dax_table *table, u64 page);
bool dax_table_is_stale(struct dax_table *table);
/*
 * Whether all pages before this one that the file has were looked up, and none is stale. The file's
 * invalidation lock is held.
 */
bool dax_table_is_current(struct dax_table *table, u64 end);
u64 dax_table_unmaps(struct dax_table *table);
/* Notes that the file system serves a page, which may have a block by now. */
void dax_table_misses(struct dax_table *table, u64 page);
/* Calls the function for all leaves. */
void dax_table_each_leaf(struct dax_table *table,
			 void (*visit)(void *data, u64 page, pteval_t leaf), void *data);
/* For self-checks: counts leaves that do not lead to the file's blocks. */
u64 dax_table_wrong(struct dax_table *table);

/* device.c */
/* Whether the file can have a table, and the descriptor may be used for it. */
int dax_check_file(const struct file *file);
/* The handle that a table's descriptor has; NULL: it is another file's. */
const struct dax_handle *dax_handle_of(const struct file *file);

/* attach.c */
/*
 * The file loses these pages. No attachment shows them when this returns, and no TLB has them. Must
 * not sleep.
 */
void dax_attachments_lose(struct dax_table *table, u64 first, u64 end);
/* Flushes translations of the pages where the table is attached. */
void dax_attachments_flush(struct dax_table *table, u64 first, u64 end);
/* Writes back what was stored to leaves that the file system has made, and drops these. */
void dax_attachments_empty(struct dax_table *table, u64 first, u64 end);
u64 dax_attachments_count(struct dax_table *table);
/* For self-checks: counts wrong entries in processes. */
u64 dax_attachments_wrong(struct dax_table *table);

/* blocks.c */
int dax_blocks_open(struct dax_table *table, const struct file *file);
void dax_blocks_close(struct dax_table *table);
/* Whether what is written back from the CPUs' caches is durable then. */
bool dax_blocks_can_be_durable(const struct dax_table *table);
/* What a refresh knows of the file while it looks for blocks. */
struct dax_lookup {
	struct file	*file;		/* the refresh's own: its position changes */
	u64		first, end;	/* pages without a hole, all of which could be read */
	bool		has_failed;	/* some could not */
};

/* Whether the file system takes the inode's lock when it counts extents. */
enum dax_fiemap {
	DAX_FIEMAP_UNKNOWN,
	DAX_FIEMAP_LOCKS,
	DAX_FIEMAP_LACKS_LOCK,
};

/*
 * Finds that out, by the table's file, unless it is known. The caller has no lock. May take a
 * second.
 */
void dax_blocks_probe(const struct dax_table *table);
enum dax_fiemap dax_blocks_knows(void);
/* How often extents were counted. */
u64 dax_blocks_counted(void);
/*
 * Finds the frames of pages. 0: the file has no written block there, or it cannot be read. Takes
 * the inode's lock. Of one page nothing need be known. Returns 0, or -EINTR.
 */
int dax_blocks_find(struct dax_table *table, struct dax_lookup *lookup, u64 page,
		    unsigned int count, u64 *frames);
/*
 * Returns the first page at or after this one that may have a written block; U64_MAX: there is
 * none. Moves the position of the descriptor. Takes the inode's lock.
 */
u64 dax_blocks_next(struct file *file, u64 page);

/*
 * Whether the file has these blocks in a row for these pages, all of them written. Takes the
 * inode's lock.
 */
bool dax_blocks_are(struct dax_lookup *lookup, u64 page, u64 count, u64 block);
/* Finds the frames of blocks in a row. 0: it cannot be read. */
void dax_blocks_place(struct dax_table *table, u64 block, unsigned int count, u64 *frames);

/* stored.c */
/*
 * Reads the file's stored table. NULL: there is none, or not one for this file as it is. `file` is
 * a descriptor of the file. May wait for other programs. An error: another time it may be there.
 */
struct dax_stored *dax_stored_load(const struct file *file);
void dax_stored_free(struct dax_stored *stored);
/* A refresh begins. What the file had before does not count. */
void dax_stored_begin(struct dax_stored *stored);
/* A refresh has ended. Returns how many pages the stored table has named the blocks of. */
u64 dax_stored_conclude(struct dax_stored *stored);
/*
 * As dax_blocks_find(), but asks the file system only whether what is stored is right, once for
 * each extent. If it is not, forgets it.
 */
int dax_stored_find(struct dax_stored *stored, struct dax_table *table, struct dax_lookup *lookup,
		    u64 page, unsigned int count, u64 *frames);
void dax_stored_count(struct vellum_dax_tables *counts);
int dax_stored_start(void);
void dax_stored_end(void);

/* watch.c */
int dax_watch_start(void);
void dax_watch_end(void);

/* map.c */
int dax_map(struct file *file, struct vm_area_struct *vma);
unsigned long dax_area(struct file *file, unsigned long addr, unsigned long len,
		       unsigned long pgoff, unsigned long flags);

/* sync.c */
/* Flushes from the CPUs' caches what was stored to the pages. */
void dax_flush_stores(struct dax_table *table, u64 first, u64 end);
/* Updates the file's times if something was stored. `file` is a descriptor of the file, or NULL. */
void dax_update_times(struct dax_table *table, struct file *file);
/* Makes durable what was stored in a range of bytes, and what the file system has to write. */
int dax_sync(struct dax_table *table, struct file *file, loff_t start, loff_t end, int datasync);
int dax_fsync(struct file *file, loff_t start, loff_t end, int datasync);

/* check.c */
void dax_check_init(struct dentry *folder);

int dax_init(struct dentry *folder);
void dax_exit(void);

#endif /* VELLUM_DAX_H */
