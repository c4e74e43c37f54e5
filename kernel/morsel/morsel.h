/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A Morsel: an inode with a tree of page tables, which any number of processes mount.
 *
 *	fs.c		the file system: names, owners, how much memory there may be
 *	shape.c		how a Morsel gets its shape, what it is sealed against, its end
 *	file.c		what is done with a descriptor
 *	map.c		mapping, faults, rights
 *	populate.c	pages come: one by one, or 2 MiB at a time
 *	punch.c		pages go
 *	fill.c		pages are read from a file
 *	reader.c	leaves for who may only read
 *	check.c		self-check in debugfs
 *	device.c, slots.c, recover.c	where it is if it is to outlive the machine: see device.h
 *
 * How pages come and go. A leaf of 4 KiB is put by one atomic operation and without a lock, or on a
 * device under the lock of its table; of several threads that put one, one wins. It is taken off
 * under the lock of its table, and a thread that wants its page for a moment, to copy from it or to
 * it, takes a reference under that lock. Everything above
 * leaves of 4 KiB changes under the Morsel's mutex `tables`: an entry of level 2 goes from none to a
 * table, and stays one, or from none to a leaf of 2 MiB, which goes back to none or becomes a table.
 * So there is no entry that is a table once and a leaf later, which the core would not bear.
 *
 * Locks: mmap lock > state > charging > tables > locks of mounts > locks of page tables. To copy from user
 * memory or to it none of them is held.
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
	struct list_head	node;	/* in the list of all */

	struct mutex		state;	/* one at a time: shape, seals, revocation */
	/* Set by creation, which is done when there is an order; unchanged afterwards. */
	bool			is_shaped;
	unsigned int		order;
	u64			length;	/* bytes */
	u64			flags;
	u64			address;
	u64			leaf_flags;
	/* Change under `state`, and are read by anybody. */
	u64			seals;
	bool			is_revoked;
	/* Under `state`: mappings through descriptors for writing, and calls that write. */
	u64			writers;

	struct mutex		tables;	/* see above */
	struct pt_tree		tree;
	/* What readers mount; NULL until there is one. */
	struct pt_tree		*reader;
	struct pt_mounts	mounts;
	atomic64_t		pages;	/* that are there */
	/* Where 2 MiB are or were, by the number of 512 pages; empty if they may return. */
	struct xarray		blocks;

	/* Whose locked memory it is, and how many pages that may be; NULL: of no user. */
	struct user_struct	*user;
	u64			lock_limit;

	/* Where its pages and tables are, if not in the kernel's memory; NULL. */
	struct morsel_device	*device;
	/* Where the device has it, under `state`; NULL without a name. */
	struct morsel_slot	*slot;
};

/* Flags of creation that this module knows. */
#define MORSEL_FLAGS \
	(VELLUM_MORSEL_PINNABLE | VELLUM_MORSEL_INHERIT | \
	 (PT_HUGE_IS_POSSIBLE ? VELLUM_MORSEL_HUGE : 0))

static inline struct morsel *morsel_of(const struct inode *inode)
{
	return container_of(inode, struct morsel, inode);
}

/* Whether it has its order and its tree. */
static inline bool morsel_is_shaped(const struct morsel *morsel)
{
	/* Pairs with the release at the end of creation. */
	return smp_load_acquire(&morsel->is_shaped);
}

/* Pages that it may have. */
static inline u64 morsel_page_count(const struct morsel *morsel)
{
	return DIV_ROUND_UP(morsel->length, PAGE_SIZE);
}

/* Whether the leaf is there for processors: that of a device is durable by then, and not before. */
static inline bool morsel_is_shown(u64 leaf)
{
	return leaf & _PAGE_PRESENT;
}

/* Takes 2 MiB off an entry under the lock of its table. */
static inline u64 morsel_clear_entry(u64 *entry)
{
	spinlock_t *lock = pt_table_lock(entry);
	u64 old;

	spin_lock(lock);
	old = xchg(entry, 0);
	spin_unlock(lock);
	return old;
}

/* fs.c: pages for data and for tables; false: the file system, or the user, may have no more. */
bool morsel_charge(struct morsel *morsel, u64 pages);
void morsel_uncharge(struct morsel *morsel, u64 pages);
/*
 * Attempts what charges for the page, and what is with it. When it is refused, once more and alone:
 * others may have had the last page for this very one, or more than they need, and for a moment.
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
/* For as long as something may be written. EPERM, EIO. */
int morsel_begin_writing(struct morsel *morsel);
void morsel_end_writing(struct morsel *morsel);

/*
 * populate.c: the page is there afterwards. EFAULT it is beyond the length; EPERM holes are to stay;
 * EIO revoked; ENOSPC, ENOMEM.
 */
int morsel_populate(struct morsel *morsel, u64 page);
int morsel_populate_range(struct morsel *morsel, u64 first, u64 count);
/* A page that nothing refers to any more, but for who has got it by morsel_get_page. */
void morsel_free_page(struct morsel *morsel, struct page *page);
/* A page-table entry has changed, and what is done next relies on that. */
void morsel_persist_entry(struct morsel *morsel, const u64 *entry);
/*
 * Makes a table of level 1 for the page, or puts 2 MiB there; in the reader's tree, if that is how
 * the other one has it.
 */
int morsel_make_room(struct morsel *morsel, struct pt_tree *tree, u64 page);
/* The page with a reference, or NULL where there is none. */
struct page *morsel_get_page(struct morsel *morsel, u64 page);

/* punch.c: bytes become zeros, and pages go that are whole within. */
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
/* The same for 2 MiB. */
void morsel_hide_block(struct morsel *morsel, u64 page);
/* For morsel_make_room. */
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
