/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A mount: a tree in the page tables of one process.
 *
 * As few entries as the length allows put the tree there: one, if the mapping is exactly as long as
 * a table's extent; otherwise one for each table that the mapping covers as a whole. The pages at
 * the end that fill no table of level 1 are the tail. The tail gets a table of the process' own
 * that mirrors the tree's table, because other mappings may use the rest of it.
 *
 * A mount may be detached at any time. Before the core walks page tables in the range, for whatever
 * reason, the entries are taken out, so the core finds nothing there. The next fault attaches the
 * mount again. The tree lives on meanwhile, and the process does not see it.
 *
 * On the way to that fault the core fills the slots with tables of its own, and other faults may be
 * in these. So an attached mount keeps them as they are, with nothing in them. A detached mount has
 * them in its slots again, where the core frees them when the mapping ends.
 *
 *	mmap                 pt_mount_create     attached
 *	notifier, fork, ...  (own hooks)         detached
 *	fault                pt_mount_refault    attached
 *	munmap, exit         (own hooks)         gone
 *
 * A mount may also be barred: it stays detached until it is unbarred, and its owner shows pages by
 * entries in the process' own tables. An attached mount hides what is left of them. They are there
 * again, where the core finds them, when it is detached.
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
	pteval_t	*table;
	/* The tree's entry for a table of level 1, which the slot has a copy of; or NULL. */
	pteval_t	*entry;
	/* While attached: the entry that the slot had, which belongs to the core. */
	pteval_t	own;
};

struct pt_mount {
	struct pt_tree		*tree;
	/*
	 * The same pages with read-only leaves, for mappings that may not write. Without it the
	 * entries of such a mapping lack the right to write. Then nothing may pin pages by their
	 * leaves, and no piece is of level 1: the core clears such an entry of level 2.
	 */
	struct pt_tree		*reader;
	struct rb_node		node;	/* in pt_mounts, if other processes may mount the tree */
	struct mm_struct	*process;	/* sorts the mount there */
	/*
	 * The owner of the page tables; NULL: not mounted. Changes under the mmap lock, held for
	 * writing. Notifiers can tell this process: the mount's own notifier is one of them.
	 */
	struct mm_struct	*mm;
	struct address_space	*mapping;	/* of the file that mounts the tree */
	unsigned long		start, end;
	u64			pages;		/* that the mapping covers, from the first one */
	struct mmu_interval_notifier notifier;

	/* Where the tables go. These do not change while mounted. */
	struct pt_piece		*pieces;
	unsigned int		count;
	/* The first page of the tail; the same wherever the tree is mounted. */
	u64			tail;
	pteval_t		*tail_leaves;

	spinlock_t		lock;	/* protects all below, and the entries of the pieces */
	bool			attached;
	bool			reads;		/* attached for a mapping that may not write */
	bool			barred;
	unsigned int		serving;	/* faults that the owner serves meanwhile */
	bool			dead;		/* the process is ending */
	bool			stale;		/* taken out, and perhaps not flushed */
	bool			failed;		/* the last mount for a child failed */
	pteval_t		*tail_mirror;	/* while attached */
	unsigned int		listeners;	/* see pt_secondary.h */
	bool			ending;		/* no listener comes any more */
	u64			attaches, detaches;
};

void pt_mount_init(struct pt_mount *mount, struct pt_tree *tree);
int pt_mount_create(struct pt_mount *mount, struct vm_area_struct *vma);
/*
 * Like pt_mount_create(), but a fault attaches the mount first. The VMA may be shorter than the
 * tree.
 */
int pt_mount_create_detached(struct pt_mount *mount, struct vm_area_struct *vma);
vm_fault_t pt_mount_refault(struct pt_mount *mount, struct vm_fault *vmf);
void __pt_mount_mirror(struct pt_mount *mount, u64 page);
void pt_mount_detach(struct pt_mount *mount);
/*
 * Detaches the mount and keeps it so. True: it was barred before, and stays detached until
 * pt_mount_served(), even if it is unbarred meanwhile: the caller may put entries into the process'
 * own tables. False: what a fault has found in page tables may be the tree's, and the access has to
 * be tried again.
 */
bool pt_mount_bar(struct pt_mount *mount);
void pt_mount_served(struct pt_mount *mount);

/* Addresses of one process. It begins empty. */
struct pt_area {
	unsigned long	start, end;
};

/* Adds the addresses at which the mount shows the pages, if it is attached. */
void pt_mount_find(struct pt_mount *mount, u64 page, u64 count, struct pt_area *area);
/* Takes the tree out of the process, and adds the addresses that the caller then flushes. */
void pt_mount_take_out(struct pt_mount *mount, struct pt_area *area);
/*
 * Makes secondary MMUs of the process that has the tree mounted forget the pages, after leaves
 * changed and the TLBs of `flushed` were flushed. If another process has the tree mounted by now,
 * its TLBs are flushed as well. May sleep.
 */
void __pt_mount_tell(struct pt_mount *mount, const struct mm_struct *flushed, u64 page, u64 count);

static inline void pt_mount_tell(struct pt_mount *mount, const struct mm_struct *flushed, u64 page,
				 u64 count)
{
	/*
	 * Once the process' memory has ended, or before the mount is complete, the core has told
	 * all listeners.
	 */
	if (unlikely(READ_ONCE(mount->mm) != flushed || !pt_secondary_is_none(flushed)))
		__pt_mount_tell(mount, flushed, page, count);
}

/* For self-checks: counts entries of the process that do not fit the mount's state. */
u64 pt_mount_wrong(struct pt_mount *mount);

/*
 * To be called after an entry of level 2 changed between a table and a leaf, and before TLBs are
 * flushed. Where the table is mounted by itself, the process has a copy of the entry.
 */
void pt_mount_entry_changed(struct pt_mount *mount, u64 page);
pteval_t __pt_mount_tail_bits(struct pt_mount *mount, u64 page, pteval_t clear);

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

/* What CPUs note in the entry of a page. */
#define PT_MOUNT_NOTED	(_PAGE_ACCESSED | _PAGE_DIRTY)

/*
 * Returns what CPUs have noted of a page elsewhere than in the tree's leaf, accessed or dirty.
 * Clears the bits in `clear`.
 */
static inline pteval_t pt_mount_bits(struct pt_mount *mount, u64 page, pteval_t clear)
{
	return unlikely(page >= mount->tail) ? __pt_mount_tail_bits(mount, page, clear) : 0;
}

/*
 * The same for a page of the tail, with the mount's lock held: until that is released, what is
 * noted does not go from the process' entry to the tree's leaf, or back.
 */
pteval_t pt_mount_entry_bits(struct pt_mount *mount, u64 page, pteval_t clear);

#endif /* VELLUM_PT_MOUNT_H */
