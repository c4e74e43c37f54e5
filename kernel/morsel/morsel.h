/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A Morsel: an inode with a tree of page tables, which any number of processes mount.
 *
 *	fs.c		the file system: names, owners, the limit on memory
 *	shape.c		how a Morsel gets its shape, its seals, its end
 *	file.c		operations on a descriptor
 *	map.c		mapping, faults, rights
 *	populate.c	pages come: one by one, or 2 MiB at a time
 *	punch.c		pages go
 *	fill.c		pages are read from a file
 *	reader.c	read-only leaves for mappings that may only read
 *	check.c		self-check in debugfs
 *	device.c, slots.c, recover.c	Morsels that outlive the machine: see device.h
 *
 * How pages come and go. One atomic operation puts a leaf of 4 KiB, without a lock; on a device it
 * is put under the lock of its table. Of several threads that put a leaf one wins. A leaf is taken
 * off under the lock of its table. A thread that needs its page for a moment, to copy from it or to
 * it, takes a reference under that lock. Everything above leaves of 4 KiB changes under the
 * Morsel's mutex `tables`. An entry of level 2 goes from none to a table, and stays one; or it goes
 * from none to a leaf of 2 MiB, and from there back to none or to a table. So no entry is a table
 * first and a leaf later, which the core would not tolerate.
 *
 * Locks: mmap lock > state > charging > tables > locks of mounts > locks of page tables. A thread
 * that copies from user memory or to it holds none of them.
 */
#ifndef VELLUM_MORSEL_H
#define VELLUM_MORSEL_H

#include <linux/fs.h>
#include <linux/mutex.h>
#include <linux/types.h>
#include <vellum/morsel.h>

#include "core/compat.h"
#include "core/pt_huge.h"
#include "core/pt_mount.h"
#include "core/pt_mounts.h"
#include "core/pt_tree.h"
#include "morsel/device.h"

struct morsel {
	struct inode		inode;
	struct list_head	node;	/* in the list of all Morsels */

	struct mutex		state;	/* serialises shape, seals, revocation */
	/* Set by creation, which is complete when there is an order; unchanged afterwards. */
	bool			is_shaped;
	unsigned int		order;
	u64			length;	/* bytes */
	u64			flags;
	u64			address;
	pteval_t		leaf_flags;
	/* Change under `state`, and are read without it. */
	u64			seals;
	bool			is_revoked;
	/*
	 * Under `state`: the number of mappings through descriptors for writing, and of calls that
	 * write.
	 */
	u64			writers;

	struct mutex		tables;	/* see above */
	struct pt_tree		tree;
	/* The tree that readers mount; NULL until there is one. */
	struct pt_tree		*reader;
	struct pt_mounts	mounts;
	atomic64_t		pages;	/* pages that are there */
	/* Where a leaf of 2 MiB is or was, by page number / 512; empty if leaves may return. */
	struct xarray		blocks;

	/* The user whose locked memory it is, and the user's limit in pages. NULL: of no user. */
	struct user_struct	*user;
	u64			lock_limit;

	/* The device with its pages and tables; NULL: they are in the kernel's memory. */
	struct morsel_device	*device;
	/* Its slot on the device, under `state`; NULL without a name. */
	struct morsel_slot	*slot;
};

/* The flags of creation that this module knows. */
#define MORSEL_FLAGS \
	(VELLUM_MORSEL_PINNABLE | VELLUM_MORSEL_INHERIT | \
	 (PT_HUGE_IS_POSSIBLE ? VELLUM_MORSEL_HUGE : 0))

static inline struct morsel *morsel_of(const struct inode *inode)
{
	return container_of(inode, struct morsel, inode);
}

/* Whether the Morsel has its order and its tree. */
static inline bool morsel_is_shaped(const struct morsel *morsel)
{
	/* Pairs with the release in morsel_shape_locked(). */
	return smp_load_acquire(&morsel->is_shaped);
}

/* The number of pages that the Morsel may have. */
static inline u64 morsel_page_count(const struct morsel *morsel)
{
	return DIV_ROUND_UP(morsel->length, PAGE_SIZE);
}

/* Whether CPUs see the leaf. A device's leaf is durable by then, and not before. */
static inline bool morsel_is_shown(pteval_t leaf)
{
	return leaf & _PAGE_PRESENT;
}

/* Takes a leaf of 2 MiB off its entry under the lock of the table. */
static inline pteval_t morsel_clear_entry(pteval_t *entry)
{
	spinlock_t *lock = pt_table_lock(entry);
	pteval_t old;

	spin_lock(lock);
	old = xchg(entry, 0);
	spin_unlock(lock);
	return old;
}

/*
 * fs.c: charges pages for data and for tables. False: that exceeds the limit of the file system or
 * the user.
 */
bool morsel_charge(struct morsel *morsel, u64 pages);
void morsel_uncharge(struct morsel *morsel, u64 pages);
/*
 * Calls `attempt`, which charges for the page and for what comes with it. If that is refused, calls
 * it once more and alone: other threads may have had the last page for this very one, or more than
 * they need, for a moment.
 */
int morsel_charging(struct morsel *morsel, u64 page, int (*attempt)(struct morsel *, u64));

/* shape.c */
void morsel_start(struct morsel *morsel);
void morsel_end(struct morsel *morsel);
unsigned int morsel_max_order(bool is_on_device);
bool morsel_shape_is_right(const struct vellum_morsel_create *create, bool is_on_device);
int morsel_shape(struct morsel *morsel, const struct vellum_morsel_create *create);
int morsel_shape_by_length(struct morsel *morsel, u64 length);
int morsel_seal(struct morsel *morsel, u64 seals);
int morsel_revoke(struct morsel *morsel);
void morsel_adopt(struct morsel *morsel, struct morsel_slot *slot);
void morsel_lose_name(struct morsel *morsel);
/* Brackets all writes. EPERM, EIO. */
int morsel_begin_writing(struct morsel *morsel);
void morsel_end_writing(struct morsel *morsel);

/*
 * populate.c: makes the page be there. EFAULT it is beyond the length; EPERM holes are sealed; EIO
 * revoked; ENOSPC, ENOMEM.
 */
int morsel_populate(struct morsel *morsel, u64 page);
int morsel_populate_range(struct morsel *morsel, u64 first, u64 count);
/* Frees a page that nothing refers to any more, except callers of morsel_get_page(). */
void morsel_free_page(struct morsel *morsel, struct page *page);
/* Makes a change of a page-table entry durable before the next step relies on it. */
void morsel_persist_entry(struct morsel *morsel, const pteval_t *entry);
/*
 * Makes a table of level 1 for the page, or puts a leaf of 2 MiB there. In the reader's tree it
 * does what the other tree has done.
 */
int morsel_make_room(struct morsel *morsel, struct pt_tree *tree, u64 page);
/* Returns the page with a reference, or NULL where there is none. */
struct page *morsel_get_page(struct morsel *morsel, u64 page);

/* punch.c: zeroes the bytes, and frees the pages that are whole within them. */
int morsel_punch(struct morsel *morsel, u64 offset, u64 length);
int morsel_punch_pages(struct morsel *morsel, u64 first, u64 end);

/* fill.c */
int morsel_fill(struct file *file, struct vellum_morsel_fill *fill);
int morsel_fill_init(void);
void morsel_fill_exit(void);

/* reader.c */
int morsel_make_reader(struct morsel *morsel);
int morsel_show_reader(struct morsel *morsel, u64 page);
void morsel_destroy_reader(struct morsel *morsel);
void morsel_hide_from_reader(struct morsel *morsel, u64 page);
/* Hides a leaf of 2 MiB. */
void morsel_hide_block(struct morsel *morsel, u64 page);
/* For morsel_make_room(). */
int morsel_make_readers_room(struct morsel *morsel, u64 page);
u64 morsel_reader_wrong(struct morsel *morsel);

/* map.c */
int morsel_map(struct file *file, struct vm_area_struct *vma);
unsigned long morsel_area(struct file *file, unsigned long addr, unsigned long len,
			  unsigned long pgoff, unsigned long flags);

extern const struct file_operations morsel_file_operations;
extern const struct inode_operations morsel_file_inode_operations;

void morsel_register(struct morsel *morsel);
void morsel_unregister(struct morsel *morsel);
void morsel_check_init(struct dentry *folder);

int morsel_init(struct dentry *folder);
void morsel_exit(void);

#endif /* VELLUM_MORSEL_H */
