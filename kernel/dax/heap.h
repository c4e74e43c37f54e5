/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Ephemeral mappings: files that a process maps for a short time, without a VMA for each.
 *
 *	slots.c		slots: entries of level 2 that hold tables of files
 *	attach.c	attachments: a part of a file in some slots; faults, zombies
 *	scratch.c	the file system serves a fault without entries in the process' page tables
 *	heap.c		the heap's descriptor, its VMA, its notifier
 *
 * A heap is one VMA of a process, whose 2 MiB slots hold tables of level 1 of any files. Everything
 * above the slots belongs to the process. A thread attaches a part of a file by an atomic claim of
 * slots and by writing their entries. It makes no VMA, and takes the mmap lock only where a slot is
 * used for the first time ("DaxVM", MICRO '22, section IV.B). When it detaches them, the entries
 * change back at once. TLBs are flushed for many detachments together; until then the slots are not
 * used again, and the attachment is a zombie (section IV.C).
 *
 * No VMA of a heap is among those of the files. So what the core does for an ordinary mapping when
 * a file loses blocks, the watch (watch.c) does for attachments: it takes them out and flushes,
 * zombies included. As for any mount, an attachment's slots are put in only under the file's
 * invalidation lock (dax.h).
 *
 * Each slot has an empty table of the process' own, from its first use on, which is in the entry
 * whenever no file's table is: the core reads such an entry twice, and frees what is in it. Where
 * the file's table has no leaf, the slot is served: its own table gets leaves, one in a fault, that
 * the file system has made elsewhere (scratch.c). They are like those of a file table: nothing can
 * pin their pages. They are dropped when the file loses blocks, when it is synced, and when the
 * core is about to walk the range.
 *
 * A heap is closed, for good, when its VMA is unmapped, copied or moved: then nothing is put in any
 * more. A thread that puts something in does not hold the mmap lock, and checks that under the
 * region's lock.
 *
 * Locks: growing > mmap lock > invalidation lock > shape > attachments_lock > a region's lock >
 * locks of page tables, a table's lock.
 */
#ifndef VELLUM_DAX_HEAP_H
#define VELLUM_DAX_HEAP_H

#include <linux/bitmap.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/llist.h>
#include <linux/mmu_notifier.h>
#include <linux/mutex.h>
#include <linux/refcount.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>

#include "core/pt_tree.h"
#include "dax/dax.h"

/* Slots of a region, which one table of level 2 covers. */
#define DAX_REGION_SLOTS	PT_ENTRIES
#define DAX_SLOT_SIZE		VELLUM_DAX_UNIT
#define DAX_REGION_SIZE		(DAX_REGION_SLOTS * DAX_SLOT_SIZE)
#define DAX_MAX_REGIONS		(VELLUM_DAX_MAX_EXTENT / DAX_REGION_SIZE)

/*
 * A part of a file in slots of a heap that are in a row, in one region. The slots are released when
 * the last reference goes.
 */
struct dax_attachment {
	refcount_t		references;
	struct dax_heap		*heap;
	struct dax_table	*table;
	struct file		*file;
	const struct vm_operations_struct *operations;	/* the file system's, on a mapping */
	bool			is_durable;	/* as for a mapping */
	bool			is_synced;	/* by msync: the program does not flush by itself */
	u64			page;		/* of the first slot, in the file */
	unsigned int		slot, count;	/* slots of the heap */
	bool			is_detached;	/* under the region's lock */
	struct list_head	node;		/* among the table's */
	struct llist_node	zombie;
};

struct dax_slot {
	struct dax_attachment	*attachment;	/* that it belongs to, also as a zombie */
	pteval_t		own;		/* the entry of its own table; 0: it has none yet */
};

struct dax_region {
	/* Claimed by atomic operations. The thread that has claimed a slot sets `own`. */
	DECLARE_BITMAP(taken, DAX_REGION_SLOTS);
	spinlock_t		lock;	/* protects all below, and the slots' entries */
	DECLARE_BITMAP(attached, DAX_REGION_SLOTS);	/* the file's table is in the entry */
	DECLARE_BITMAP(served, DAX_REGION_SLOTS);	/* the own table may have leaves */
	struct dax_slot		slots[DAX_REGION_SLOTS];
	u64			frames[PT_ENTRIES];	/* while an own table is emptied */
	/* By their first slots. Each belongs to the thread that has claimed the slot. */
	struct dax_attachment	attachments[DAX_REGION_SLOTS];
	u64			attaches, detaches, served_faults;	/* since the beginning */
};

struct dax_heap {
	struct kref		references;	/* the descriptor; threads that sync a file */
	bool			writes;
	unsigned int		batch;		/* zombies that are flushed together */
	/* The owner of the page tables, once it is mapped. */
	struct mm_struct	*mm;
	unsigned long		start, end;
	struct mmu_notifier	notifier;
	atomic_t		invalidating;	/* the core walks the range now */
	bool			closed;

	struct mutex		growing;	/* regions are made; protects the next three */
	/* Of the files that were attached first: the file system's operations on a mapping. */
	const struct file_operations *file_operations;
	const struct vm_operations_struct *operations;
	struct module		*module;	/* has these */
	unsigned int		region_count;
	struct dax_region	*regions[DAX_MAX_REGIONS];

	struct llist_head	zombies;
	atomic_t		zombie_count;
	struct mutex		reap_lock;	/* held until what left the list is gone */
	struct delayed_work	reaping;
	atomic64_t		flushes;
};

/* slots.c */

/* Keeps the VMA, and with it the tables above its slots, until the mmap lock is released. */
int dax_heap_keep_mapped(struct dax_heap *heap);

static inline unsigned long dax_slot_address(const struct dax_heap *heap, unsigned int slot)
{
	return heap->start + slot * DAX_SLOT_SIZE;
}

/* The region of a slot; NULL: no slot of it was claimed so far. */
static inline struct dax_region *dax_region_of(struct dax_heap *heap, unsigned int slot)
{
	/* A region is complete before it is there. */
	return smp_load_acquire(&heap->regions[slot / DAX_REGION_SLOTS]);
}

/* The number of regions; 0: the heap is not mapped. */
static inline unsigned int dax_heap_regions(const struct dax_heap *heap)
{
	/* Where the heap is was set before. */
	return smp_load_acquire(&heap->region_count);
}

/*
 * Claims slots in a row, with their own tables. Returns the first one's number.
 *
 * Errors: ENOSPC no such row is free; ENXIO the heap is not mapped; EINTR; ENOMEM.
 */
long dax_slots_claim(struct dax_heap *heap, unsigned int count);
/* Gives them back. Nothing is in them, and no TLB has anything of what was. */
void dax_slots_release(struct dax_heap *heap, unsigned int slot, unsigned int count);
/*
 * Puts a table into a slot. The region's lock is held. False: it was not put in, as the slot is
 * served, the heap is closed, or the core walks the range.
 */
bool dax_slot_put_in(struct dax_heap *heap, unsigned int slot, pteval_t *table);
/*
 * Takes out what a slot has: a table, or leaves of its own. The region's lock is held. Leaves are
 * flushed from TLBs, and what was stored is written back; the caller flushes a table. Returns
 * whether something was stored by leaves.
 */
bool dax_slot_take_out(struct dax_heap *heap, unsigned int slot);
/*
 * From now on the slot is served: its own table is in the entry. The region's lock is held. False:
 * the heap is closed, or the core walks the range.
 */
bool dax_slot_serve(struct dax_heap *heap, unsigned int slot);
/*
 * Gives a slot a leaf, if it is still served and may be filled. The region's lock is held.
 */
void dax_slot_put_leaf(struct dax_heap *heap, unsigned int slot, unsigned int page,
		       pteval_t leaf);
/* Takes out whatever slots in the range have, and flushes. Must not sleep. */
void dax_slots_take_out(struct dax_heap *heap, unsigned long start, unsigned long end);
bool dax_slot_is_served(struct dax_heap *heap, unsigned int slot);
void dax_slots_free(struct dax_heap *heap);
/* For self-checks: counts slots whose entries are not what they should be. */
u64 dax_slots_wrong(struct dax_heap *heap, unsigned int slot, unsigned int count);

/* attach.c */
/* The ioctl, with its argument. */
long dax_attach(struct dax_heap *heap, unsigned long argument);
int dax_detach(struct dax_heap *heap, unsigned long address);
/* Detaches everything; the VMA is ending. */
void dax_detach_all(struct dax_heap *heap);
/* Flushes TLBs, and lets go of what was detached. Waits for other threads that do. */
void dax_reap(struct dax_heap *heap);
vm_fault_t dax_attachment_fault(struct dax_heap *heap, struct vm_fault *vmf, bool is_mkwrite);
int dax_attachments_sync(struct dax_heap *heap, loff_t start, loff_t end, int datasync);

/* scratch.c */
/*
 * Has the file system serve a page. Returns what it said, and the leaf that it has made, or 0.
 */
vm_fault_t dax_scratch_fault(const struct dax_attachment *attachment, const struct vm_fault *vmf,
			     u64 page, bool is_mkwrite, pteval_t *leaf);

/* heap.c */
void dax_heap_get(struct dax_heap *heap);
void dax_heap_put(struct dax_heap *heap);
/* Asks the file system of the attachment's file for its operations on a mapping. */
int dax_heap_ask(struct dax_heap *heap, struct dax_attachment *attachment);
long dax_heap_open(unsigned long argument);

#endif /* VELLUM_DAX_HEAP_H */
