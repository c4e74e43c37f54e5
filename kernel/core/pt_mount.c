// SPDX-License-Identifier: GPL-2.0
/*
 * The life of a mount. pt_mount.h describes it.
 *
 * Locks: mmap lock > mount->lock > locks of page tables. A notifier may run without the mmap lock.
 * So mount->lock decides whether a mount is attached, by the protocol of interval notifiers: an
 * entry is set only if no invalidation has begun since the sequence was read.
 */

#include <linux/file.h>
#include <linux/slab.h>

#include "core/compat.h"
#include "core/pt_flush.h"
#include "core/pt_mount.h"
#include "core/pt_notifier.h"
#include "core/pt_pieces.h"
#include "core/pt_secondary.h"
#include "core/pt_slot.h"
#include "core/pt_userfault.h"
#include "trace.h"

void pt_mount_init(struct pt_mount *mount, struct pt_tree *tree)
{
	memset(mount, 0, sizeof(*mount));
	mount->tree = tree;
	mount->tail = U64_MAX;
	spin_lock_init(&mount->lock);
}

/* Copies the tree's leaves of the tail to where the process sees them. */
static void pt_mount_fill_tail(struct pt_mount *mount)
{
	spinlock_t *lock = pt_table_lock(mount->tail_mirror);
	u64 i;

	/* The core changes entries of the process' own table under this lock. */
	spin_lock(lock);
	for (i = 0; i < mount->pages - mount->tail; i++)
		WRITE_ONCE(mount->tail_mirror[i], READ_ONCE(mount->tail_leaves[i]));
	spin_unlock(lock);
}

/*
 * Copies a leaf over the process' entry. If both have the same frame, the process may have used it
 * since, and what CPUs have noted in the entry stays: for HARVEST a write must not get lost.
 */
static void pt_mount_update_entry(pteval_t *entry, pteval_t leaf)
{
	pteval_t old = READ_ONCE(*entry), noted;

	do {
		noted = 0;
		if ((leaf & old & _PAGE_PRESENT) && pt_leaf_pfn(leaf) == pt_leaf_pfn(old))
			noted = old & PT_MOUNT_NOTED;
	} while (!try_cmpxchg(entry, &old, leaf | noted));
}

void __pt_mount_mirror(struct pt_mount *mount, u64 page)
{
	u64 i = page - mount->tail;
	spinlock_t *lock;

	spin_lock(&mount->lock);
	if (mount->attached) {
		lock = pt_table_lock(mount->tail_mirror);
		spin_lock(lock);
		pt_mount_update_entry(mount->tail_mirror + i, READ_ONCE(mount->tail_leaves[i]));
		spin_unlock(lock);
	}
	spin_unlock(&mount->lock);
}

/* The slot's entry for a piece while the mount is attached. */
static pteval_t pt_mount_slot_entry(const struct pt_mount *mount, const struct pt_piece *piece)
{
	if (mount->reads && mount->reader)
		return pt_table_entry(mount->reader->root);
	if (mount->reads)
		return pt_table_entry(piece->table) & ~_PAGE_RW;
	return piece->entry ? READ_ONCE(*piece->entry) : pt_table_entry(piece->table);
}

void pt_mount_entry_changed(struct pt_mount *mount, u64 page)
{
	unsigned int low = 0, high, middle;
	unsigned long addr;

	spin_lock(&mount->lock);
	if (mount->attached) {
		/* Finds the last piece that begins no later. Pieces are in order. */
		addr = mount->start + (page << PAGE_SHIFT);
		for (high = mount->count; high - low > 1;) {
			middle = low + (high - low) / 2;
			if (mount->pieces[middle].addr <= addr)
				low = middle;
			else
				high = middle;
		}
		if (mount->count && mount->pieces[low].level == PG_LEVEL_4K)
			pt_slot_set(mount->mm, mount->pieces[low].addr, PG_LEVEL_4K,
				    pt_mount_slot_entry(mount, &mount->pieces[low]));
	}
	spin_unlock(&mount->lock);
}

/* Sets bits in the entry of a page that is there. Other entries are left to their owner. */
static void pt_mount_set_bits(pteval_t *entry, pteval_t bits)
{
	pteval_t old = READ_ONCE(*entry);

	while ((old & _PAGE_PRESENT) && (old & bits) != bits &&
	       !try_cmpxchg(entry, &old, old | bits))
		;
}

pteval_t pt_mount_entry_bits(struct pt_mount *mount, u64 page, pteval_t clear)
{
	pteval_t noted;
	pteval_t *entry;
	spinlock_t *lock;

	lockdep_assert_held(&mount->lock);
	if (!mount->attached)
		return 0;
	lock = pt_table_lock(mount->tail_mirror);
	spin_lock(lock);
	entry = mount->tail_mirror + (page - mount->tail);
	noted = READ_ONCE(*entry);
	while (!try_cmpxchg(entry, &noted, noted & ~clear))
		;
	spin_unlock(lock);
	return noted & PT_MOUNT_NOTED;
}

pteval_t __pt_mount_tail_bits(struct pt_mount *mount, u64 page, pteval_t clear)
{
	pteval_t noted;

	spin_lock(&mount->lock);
	noted = pt_mount_entry_bits(mount, page, clear);
	spin_unlock(&mount->lock);
	return noted;
}

/* Takes the tail out of the process. What the CPUs have set there goes to the tree. */
static void pt_mount_empty_tail(struct pt_mount *mount)
{
	spinlock_t *lock;
	u64 i;

	if (!mount->tail_mirror)
		return;
	lock = pt_table_lock(mount->tail_mirror);
	spin_lock(lock);
	for (i = 0; i < mount->pages - mount->tail; i++)
		pt_mount_set_bits(mount->tail_leaves + i,
				  xchg(mount->tail_mirror + i, 0) & PT_MOUNT_NOTED);
	spin_unlock(lock);
	mount->tail_mirror = NULL;
}

static void pt_mount_take_out_locked(struct pt_mount *mount)
{
	unsigned int i;

	lockdep_assert_held(&mount->lock);
	if (!mount->attached)
		return;
	for (i = 0; i < mount->count; i++)
		pt_slot_set(mount->mm, mount->pieces[i].addr, mount->pieces[i].level,
			    mount->pieces[i].own);
	pt_mount_empty_tail(mount);
	mount->attached = false;
	mount->stale = true;
	mount->detaches++;
	trace_mount_detach(mount->start, mount->end, mount->count);
}

static void pt_mount_detach_locked(struct pt_mount *mount)
{
	pt_mount_take_out_locked(mount);
	if (mount->stale)
		pt_flush_tables(mount->mm, mount->start, mount->end);
	mount->stale = false;
}

void pt_mount_detach(struct pt_mount *mount)
{
	spin_lock(&mount->lock);
	pt_mount_detach_locked(mount);
	spin_unlock(&mount->lock);
}

bool pt_mount_bar(struct pt_mount *mount)
{
	bool was_barred;

	spin_lock(&mount->lock);
	was_barred = mount->barred;
	mount->barred = true;
	mount->serving += was_barred;
	pt_mount_detach_locked(mount);
	spin_unlock(&mount->lock);
	return was_barred;
}

void pt_mount_served(struct pt_mount *mount)
{
	spin_lock(&mount->lock);
	mount->serving--;
	spin_unlock(&mount->lock);
}

static void pt_area_widen(struct pt_area *area, unsigned long start, unsigned long end)
{
	area->start = area->end ? min(area->start, start) : start;
	area->end = max(area->end, end);
}

void pt_mount_find(struct pt_mount *mount, u64 page, u64 count, struct pt_area *area)
{
	unsigned long start;

	spin_lock(&mount->lock);
	start = mount->start + (page << PAGE_SHIFT);
	if (mount->attached)
		pt_area_widen(area, start, start + (count << PAGE_SHIFT));
	spin_unlock(&mount->lock);
}

/*
 * The mount stays stale, as this function does not know when the caller flushes. The notifier and
 * the end of the mapping flush again before the core goes on.
 */
void pt_mount_take_out(struct pt_mount *mount, struct pt_area *area)
{
	spin_lock(&mount->lock);
	pt_mount_take_out_locked(mount);
	if (mount->stale)
		pt_area_widen(area, mount->start, mount->end);
	spin_unlock(&mount->lock);
}

void __pt_mount_tell(struct pt_mount *mount, const struct mm_struct *flushed, u64 page, u64 count)
{
	struct pt_listener listener;
	unsigned long start;
	bool is_there;

	spin_lock(&mount->lock);
	is_there = pt_listener_find(mount, &listener);
	if (unlikely(mount->mm != flushed && mount->attached)) {
		start = mount->start + (page << PAGE_SHIFT);
		pt_flush_range(mount->mm, start, start + (count << PAGE_SHIFT));
	}
	spin_unlock(&mount->lock);
	/* If the process has unmapped the tree, the core has told the secondary MMUs. */
	if (is_there)
		pt_listener_tell(&listener, page, count);
}

u64 pt_mount_wrong(struct pt_mount *mount)
{
	/* Bits that CPUs set, and a bit that the core sets for user space of its own accord. */
	const pteval_t others = _PAGE_ACCESSED | _PAGE_DIRTY | _PAGE_NX;
	unsigned int i;
	pteval_t entry;
	u64 wrong = 0;

	spin_lock(&mount->lock);
	for (i = 0; i < mount->count && mount->attached; i++) {
		entry = pt_slot_get(mount->mm, mount->pieces[i].addr, mount->pieces[i].level);
		wrong += ((entry ^ pt_mount_slot_entry(mount, &mount->pieces[i])) & ~others) != 0;
	}
	spin_unlock(&mount->lock);
	return wrong;
}

/* Makes the tables above the slots, and the table that mirrors the tail. */
static int pt_mount_prepare_slots(struct pt_mount *mount, pteval_t **mirror)
{
	unsigned int i;
	int error;

	for (i = 0; i < mount->count; i++) {
		const struct pt_piece *piece = &mount->pieces[i];

		error = pt_slot_prepare(mount->mm, piece->addr, piece->level);
		if (error)
			return error;
	}
	*mirror = NULL;
	if (mount->tail_leaves) {
		*mirror = pt_slot_own_table(mount->mm, mount->start + (mount->tail << PAGE_SHIFT));
		if (!*mirror)
			return -ENOMEM;
	}
	return 0;
}

static void pt_mount_put_in(struct pt_mount *mount, bool reads, pteval_t *mirror)
{
	struct pt_piece *piece;
	bool has_own = false;
	unsigned int i;

	mount->reads = reads;
	mount->tail_mirror = mirror;
	if (mirror)
		pt_mount_fill_tail(mount);
	for (i = 0; i < mount->count; i++) {
		piece = &mount->pieces[i];
		piece->own = pt_slot_set(mount->mm, piece->addr, piece->level,
					 pt_mount_slot_entry(mount, piece));
		has_own |= piece->own;
	}
	mount->attached = true;
	mount->attaches++;
	trace_mount_attach(mount->start, mount->end, mount->count);
	/* CPUs may have cached the empty tables. */
	if (has_own)
		pt_flush_tables(mount->mm, mount->start, mount->end);
}

/*
 * Puts the tree into the process' page tables. The caller holds the mmap lock. Holding it for
 * reading is enough, as no table of the core is freed. Code that walks page tables without a
 * notification before it, as mprotect does, holds the lock for writing. The lock of the VMA alone
 * would not be enough: mprotect takes that lock after the mount was detached. The core holds the
 * mmap lock, too, when it calls this in a fault.
 */
static int pt_mount_attach(struct pt_mount *mount, const struct vm_area_struct *vma)
{
	unsigned long sequence;
	pteval_t *mirror;
	int error;

	mmap_assert_locked(mount->mm);
	error = pt_mount_prepare_slots(mount, &mirror);
	if (error)
		return error;
	do {
		sequence = mmu_interval_read_begin(&mount->notifier);
		spin_lock(&mount->lock);
		if (!mmu_interval_read_retry(&mount->notifier, sequence))
			break;
		spin_unlock(&mount->lock);
	} while (true);
	if (mount->dead)
		error = -ESRCH;
	else if (!mount->attached && !mount->barred && !mount->serving)
		pt_mount_put_in(mount, !(vma->vm_flags & VM_WRITE), mirror);
	spin_unlock(&mount->lock);
	return error;
}

/*
 * Detaches the mount because the core is about to walk page tables in the range, unless the
 * notification is the module's own. Must not sleep.
 */
static bool pt_mount_invalidate(struct mmu_interval_notifier *notifier,
				const struct mmu_notifier_range *range, unsigned long sequence)
{
	struct pt_mount *mount = container_of(notifier, struct pt_mount, notifier);

	spin_lock(&mount->lock);
	mmu_interval_set_seq(notifier, sequence);
	if (!pt_secondary_is_ours(range))
		pt_mount_detach_locked(mount);
	if (range->event == MMU_NOTIFY_RELEASE)
		mount->dead = true;
	spin_unlock(&mount->lock);
	return true;
}

static const struct mmu_interval_notifier_ops pt_mount_notifier_ops = {
	.invalidate = pt_mount_invalidate,
};

/* Until the last listener was told, no other process may mount the tree. */
static void pt_mount_forget(struct pt_mount *mount)
{
	kvfree(mount->pieces);
	mount->pieces = NULL;
	mount->count = 0;
	spin_lock(&mount->lock);
	mount->ending = true;
	spin_unlock(&mount->lock);
	pt_listeners_wait(mount);
	spin_lock(&mount->lock);
	mount->ending = false;
	mount->mm = NULL;
	spin_unlock(&mount->lock);
}

struct pt_mount_insertion {
	struct pt_mount		*mount;
	struct mm_struct	*mm;
};

static int pt_mount_insert_notifier(void *data)
{
	struct pt_mount_insertion *insertion = data;
	struct pt_mount *mount = insertion->mount;

	return mmu_interval_notifier_insert_locked(&mount->notifier, insertion->mm, mount->start,
						   mount->end - mount->start,
						   &pt_mount_notifier_ops);
}

/*
 * Whether nothing is in the way. After this only the core's faults put tables into the slots, and
 * those are empty.
 */
static bool pt_mount_slots_are_empty(const struct pt_mount *mount, struct mm_struct *mm)
{
	unsigned int i;

	for (i = 0; i < mount->count; i++)
		if (!pt_slot_is_empty(mm, mount->pieces[i].addr, mount->pieces[i].level))
			return false;
	return true;
}

/*
 * The mount may be detached while other code walks the page tables, if that holds the mmap lock for
 * reading. The core reads an entry above level 2 once to see that it is there, and once more to
 * walk on; some kernels do that with an entry of level 2, too. Such a slot must not become none in
 * between. So it has an empty table of the process' own while the mount is detached.
 */
static int pt_mount_fill_slots(const struct pt_mount *mount, struct mm_struct *mm)
{
	const struct pt_piece *piece;
	unsigned int i;

	for (i = 0; i < mount->count; i++) {
		piece = &mount->pieces[i];
		if ((piece->level > PG_LEVEL_4K || PT_FAULT_READS_TWICE) &&
		    pt_slot_fill(mm, piece->addr, piece->level))
			return -ENOMEM;
	}
	return 0;
}

int pt_mount_create_detached(struct pt_mount *mount, struct vm_area_struct *vma)
{
	unsigned long len = vma->vm_end - vma->vm_start;
	/* A surface of several tables of level 3 may begin within one of them. */
	unsigned long needed = min(pt_pieces_alignment(len), pt_slot_size(PG_LEVEL_2M));
	struct pt_mount_insertion insertion = { mount, vma->vm_mm };
	int error;

	if (mount->mm)
		return -EBUSY;
	if (!pt_userfault_is_refused(vma->vm_mm))
		return -EOPNOTSUPP;
	if (len >> PAGE_SHIFT > mount->tree->pages || !IS_ALIGNED(vma->vm_start, needed))
		return -EINVAL;
	mount->mapping = vma->vm_file->f_mapping;
	mount->start = vma->vm_start;
	mount->end = vma->vm_end;
	mount->pages = len >> PAGE_SHIFT;
	mount->tail_leaves = NULL;
	mount->barred = false;
	mount->dead = false;
	mount->stale = false;
	mount->failed = false;
	error = pt_pieces_find(mount);
	if (!error && !pt_mount_slots_are_empty(mount, vma->vm_mm))
		error = -EBUSY;
	if (!error)
		error = pt_mount_fill_slots(mount, vma->vm_mm);
	if (error)
		goto failed;
	error = pt_notifier_insert(pt_mount_insert_notifier, &insertion);
	if (error)
		goto failed;
	/*
	 * From now on the mount may be a listener, and not before: the first notifier allows that.
	 */
	spin_lock(&mount->lock);
	mount->mm = vma->vm_mm;
	spin_unlock(&mount->lock);
	vma->vm_private_data = mount;
	return 0;
failed:
	pt_mount_forget(mount);
	return error;
}

/*
 * Mounts the tree over the whole VMA, in ->mmap. The VMA is as long as the tree.
 *
 * Errors: EBUSY the tree is mounted, or something is in the way; EINVAL the address is not aligned,
 * or the length is wrong; EOPNOTSUPP userfaultfd cannot be kept away; ENOMEM.
 */
int pt_mount_create(struct pt_mount *mount, struct vm_area_struct *vma)
{
	int error;

	if (!mount->mm && vma_pages(vma) != mount->tree->pages)
		return -EINVAL;
	error = pt_mount_create_detached(mount, vma);
	/* A mapping that no access is allowed to is attached when its rights change. */
	if (error || !vma_is_accessible(vma))
		return error;
	error = pt_mount_attach(mount, vma);
	if (error) {
		vma->vm_private_data = NULL;
		mmu_interval_notifier_remove(&mount->notifier);
		pt_mount_forget(mount);
	}
	return error;
}

/*
 * Mounts the tree when a child accesses it for the first time. That takes the mmap lock for
 * writing. A caller that cannot release the lock meanwhile (VFIO, a debugger) gets nothing before
 * the child itself has accessed the tree.
 */
static vm_fault_t pt_mount_for_child(struct pt_mount *mount, struct vm_fault *vmf)
{
	struct mm_struct *mm = vmf->vma->vm_mm;
	struct file *file = vmf->vma->vm_file;
	unsigned long addr = vmf->address;
	struct vm_area_struct *vma;

	if (mount->failed) {
		mount->failed = false;
		return VM_FAULT_SIGBUS;
	}
	if (!(vmf->flags & FAULT_FLAG_ALLOW_RETRY))
		return VM_FAULT_SIGBUS;
	/* The caller tries again when it may wait. */
	if (vmf->flags & FAULT_FLAG_RETRY_NOWAIT)
		return VM_FAULT_RETRY;
	/* The reference keeps the mount while no lock does. */
	get_file(file);
	mmap_read_unlock(mm);
	if (!mmap_write_lock_killable(mm)) {
		vma = find_vma(mm, addr);
		/* Another thread may have unmapped it, or taken away the right to access it. */
		if (vma && vma->vm_file == file && vma->vm_private_data == mount &&
		    vma_is_accessible(vma) && !mount->mm) {
			pt_vma_start_write(vma);
			mount->failed = pt_mount_create(mount, vma);
		}
		mmap_write_unlock(mm);
	}
	fput(file);
	return VM_FAULT_RETRY;
}

/*
 * Handles a fault in a mount whose tree has the page, or can show it. Attaches the mount again if
 * it is detached.
 */
vm_fault_t pt_mount_refault(struct pt_mount *mount, struct vm_fault *vmf)
{
	int error;

	if (READ_ONCE(mount->attached))
		return VM_FAULT_NOPAGE;
	if (!mount->mm)
		return pt_mount_for_child(mount, vmf);
	error = pt_mount_attach(mount, vmf->vma);
	if (error)
		return error == -ENOMEM ? VM_FAULT_OOM : VM_FAULT_SIGBUS;
	return VM_FAULT_NOPAGE;
}

/*
 * fork or mremap has copied the VMA, and the core is about to copy or move what the page tables
 * hold: nothing. The copy maps nothing.
 */
void pt_mount_vm_open(struct vm_area_struct *vma)
{
	struct pt_mount *mount = vma->vm_private_data;

	if (mount)
		pt_mount_detach(mount);
	vma->vm_private_data = NULL;
}

/* The VMA is gone, or mmap has failed after all. */
void pt_mount_vm_close(struct vm_area_struct *vma)
{
	struct pt_mount *mount = vma->vm_private_data;

	if (!mount)
		return;
	vma->vm_private_data = NULL;
	/* The mount of a child that has never accessed it. */
	if (!mount->mm)
		return;
	pt_mount_detach(mount);
	mmu_interval_notifier_remove(&mount->notifier);
	pt_mount_forget(mount);
}

/* A part of a tree cannot be unmapped, as one entry mounts all of it. */
int pt_mount_vm_may_split(struct vm_area_struct *vma, unsigned long addr)
{
	return -EINVAL;
}

int pt_mount_vm_mremap(struct vm_area_struct *vma)
{
	return -EINVAL;
}
