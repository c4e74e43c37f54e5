/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A mount: a tree in the page tables of one process.
 *
 * The tree is put there by as few entries as its length allows: one, if the mapping is exactly as
 * long as a table's extent; otherwise one for each table that the mapping covers as a whole. The
 * pages at the end that fill no table of level 1, the tail, get a table of the process' own that
 * mirrors the tree's, because other mappings may use the rest of it.
 *
 * Detached is what a mount may be at any time: before the core walks page tables in the range for
 * whatever reason, the entries are taken out, so that it finds nothing there. The next fault
 * attaches it again. The tree goes on living meanwhile; only nobody sees it.
 *
 * On the way to that fault the core fills the slots with tables of its own, and other faults may be
 * in these. So an attached mount keeps them as they are, with nothing in them, and a detached one
 * has them in its slots again, where the core frees them when the mapping ends.
 *
 *	mmap                 pt_mount_create     attached
 *	notifier, fork, ...  (own hooks)         detached
 *	fault                pt_mount_refault    attached
 *	munmap, exit         (own hooks)         gone
 */
#ifndef VELLUM_PT_MOUNT_H
#define VELLUM_PT_MOUNT_H

#include <linux/mm.h>
#include <linux/mmu_notifier.h>
#include <linux/spinlock.h>

#include "core/pt_secondary.h"
#include "core/pt_tree.h"

struct pt_piece {
	unsigned long	addr;
	unsigned int	level;
	u64		*table;
	/* The tree's entry for a table of level 1: what is there, is in the slot. Or NULL. */
	u64		*entry;
	/* While attached: what the process' slot had, which is the core's. */
	u64		own;
};

struct pt_mount {
	struct pt_tree		*tree;
	/* The same with leaves that are read-only, for who may not write, and must be there then. */
	struct pt_tree		*reader;
	struct rb_node		node;	/* in pt_mounts, if others may mount the tree, too */
	struct mm_struct	*process;	/* by which it is sorted there */
	/*
	 * Whose page tables; NULL: not mounted. Changes under the mmap lock, held for writing. Who is
	 * in here can be told by notifiers: the mount's own is among them.
	 */
	struct mm_struct	*mm;
	struct address_space	*mapping;	/* of the file by which it is mounted */
	unsigned long		start, end;
	struct mmu_interval_notifier notifier;

	/* Where the tables go; unchanged while mounted. */
	struct pt_piece		*pieces;
	unsigned int		count;
	/* Pages from here on are in the tail; the same wherever the tree is mounted. */
	u64			tail;
	u64			*tail_leaves;

	spinlock_t		lock;	/* protects all below, and the entries of the pieces */
	bool			attached;
	bool			reads;		/* attached for who may not write */
	bool			dead;		/* the process ends */
	bool			stale;		/* it was taken out, and the flush may be still to come */
	bool			failed;		/* the last attempt to mount it for a child */
	u64			*tail_mirror;	/* while attached */
	unsigned int		listeners;	/* see pt_secondary.h */
	u64			attaches, detaches;
};

void pt_mount_init(struct pt_mount *mount, struct pt_tree *tree);
int pt_mount_create(struct pt_mount *mount, struct vm_area_struct *vma);
vm_fault_t pt_mount_refault(struct pt_mount *mount, struct vm_fault *vmf);
void __pt_mount_mirror(struct pt_mount *mount, u64 page);
void pt_mount_detach(struct pt_mount *mount);

/* Addresses of one process; none at all at first. */
struct pt_area {
	unsigned long	start, end;
};

/* Adds those at which the mount shows the pages, if it is attached. */
void pt_mount_find(struct pt_mount *mount, u64 page, u64 count, struct pt_area *area);
/* Takes the tree out of the process, and adds the addresses that the caller flushes then. */
void pt_mount_take_out(struct pt_mount *mount, struct pt_area *area);
/*
 * After leaves changed, and TLBs of this process were flushed: secondary MMUs of who has the tree
 * mounted forget the pages, and if that is another process by now, its TLBs do as well. May sleep.
 */
void __pt_mount_tell(struct pt_mount *mount, const struct mm_struct *flushed, u64 page, u64 count);

static inline void pt_mount_tell(struct pt_mount *mount, const struct mm_struct *flushed, u64 page,
				 u64 count)
{
	/* After its end, or before it is whole, the core has told everyone. */
	if (unlikely(READ_ONCE(mount->mm) != flushed || !pt_secondary_is_none(flushed)))
		__pt_mount_tell(mount, flushed, page, count);
}

/* For self-checks: entries of the process that are not what the mount's state says. */
u64 pt_mount_wrong(struct pt_mount *mount);

/*
 * To be called after an entry of level 2 changed, between a table and a leaf, and before TLBs are
 * flushed: where its table is mounted by itself, the process has an entry of its own.
 */
void pt_mount_entry_changed(struct pt_mount *mount, u64 page);
u64 __pt_mount_tail_bits(struct pt_mount *mount, u64 page, u64 clear);

/* For vm_operations_struct; the VMA's private data is the mount. */
void pt_mount_vm_open(struct vm_area_struct *vma);
void pt_mount_vm_close(struct vm_area_struct *vma);
int pt_mount_vm_may_split(struct vm_area_struct *vma, unsigned long addr);
int pt_mount_vm_mremap(struct vm_area_struct *vma);

/* To be called after a leaf changed, and before TLBs are flushed. */
static inline void pt_mount_leaf_changed(struct pt_mount *mount, u64 page)
{
	if (unlikely(page >= mount->tail))
		__pt_mount_mirror(mount, page);
}

/*
 * What processors have noted of a page apart from the tree's leaf, accessed or dirty; clears those
 * that are to be cleared.
 */
static inline u64 pt_mount_bits(struct pt_mount *mount, u64 page, u64 clear)
{
	return unlikely(page >= mount->tail) ? __pt_mount_tail_bits(mount, page, clear) : 0;
}

#endif /* VELLUM_PT_MOUNT_H */
